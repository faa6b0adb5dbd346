// Which of the known layouts (layouts.inc) the ggml of the process has. Structures that are the same in all of them
// are used as the compiler knows them; a buffer type is filled and read through this.
#pragma once

#include "ggml-backend-impl.h"

#include <cstddef>
#include <string>

struct kvq_layout {
    std::string version; // of the ggml of the process
    int api = 0;         // what a registry has to name
    // ggml_backend_buffer_type: get_name and alloc_buffer are the same everywhere
    size_t get_alignment, get_max_size, get_alloc_size, is_host, device, context, size;
    int op_custom;      // number of GGML_OP_CUSTOM
    bool known = true;  // this very version is in the table
    bool newer = false; // than any that is in it
    // ggml_backend_cuda_context: where its recordings are (cuda_layouts.inc); 0: that is not known of this version
    size_t cuda_graphs = 0;
};

// Until kvq_choose_layout has been called: that of the headers.
extern kvq_layout kvq_layout_here;

// For what ggml_version() says and the API number of its other registries; 0: there is none, the nearest version tells
// it. False with one line.
bool kvq_choose_layout(const char * version, int api, std::string & err);
int kvq_other_api(int api); // the next known API number, around to the first
// Oldest and newest version of layouts.inc.
std::string kvq_known_versions(void);
std::string kvq_known_cuda_versions(void); // whose private context of ggml-cuda is known

// A buffer type of ours, in the layout of the process.
struct kvq_own_buft {
    alignas(16) char bytes[160] = {};
    ggml_backend_buffer_type_t get() { return (ggml_backend_buffer_type_t) bytes; }
    void put(size_t offset, const void * what) { *(const void **) (bytes + offset) = what; }
};
static inline void * kvq_buft_context(ggml_backend_buffer_type_t buft) {
    return *(void **) ((char *) buft + kvq_layout_here.context);
}
