// What this source takes for granted about ggml. It compiles alone, so that a llama.cpp whose interface has
// changed is refused when the build is configured, with the facts that no longer hold, instead of by a page of
// errors, or not at all.
#include "seam.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "gguf.h"
#include "llama.h"

#include <climits>
#include <cstddef>

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

static_assert(GGML_BACKEND_API_VERSION == 2 || GGML_BACKEND_API_VERSION == 3,
    "GGML_BACKEND_API_VERSION is " TEXT(GGML_BACKEND_API_VERSION) ", this source knows 2 and 3");

using buffer_t = ggml_backend_buffer_t;
using buft_t = ggml_backend_buffer_type_t;
using dev_t_ = ggml_backend_dev_t;

// tensors and graphs
KVQ_FACT(ggml_tensor, type, enum ggml_type);
KVQ_FACT(ggml_tensor, buffer, struct ggml_backend_buffer *);
KVQ_FACT(ggml_tensor, op, enum ggml_op);
KVQ_FACT(ggml_tensor, ne, int64_t[GGML_MAX_DIMS]);
KVQ_FACT(ggml_tensor, nb, size_t[GGML_MAX_DIMS]);
KVQ_FACT(ggml_tensor, op_params, int32_t[GGML_MAX_OP_PARAMS / sizeof(int32_t)]);
KVQ_FACT(ggml_tensor, src, struct ggml_tensor * [GGML_MAX_SRC]);
KVQ_FACT(ggml_tensor, view_src, struct ggml_tensor *);
KVQ_FACT(ggml_tensor, view_offs, size_t);
KVQ_FACT(ggml_tensor, data, void *);
KVQ_FACT(ggml_tensor, name, char[GGML_MAX_NAME]);
KVQ_FACT(ggml_cgraph, nodes, struct ggml_tensor **);
KVQ_FACT(ggml_cgraph, n_nodes, int);
KVQ_FACT(ggml_cgraph, uid, uint64_t);
using tensor = struct ggml_tensor *;
static_assert(std::is_same<decltype(&ggml_set_rows), tensor (*)(ggml_context *, tensor, tensor, tensor)>::value,
    "ggml_set_rows, which writes the cache, has other arguments");
using attention = tensor (*)(ggml_context *, tensor, tensor, tensor, tensor, float, float, float);
static_assert(std::is_same<decltype(&ggml_flash_attn_ext), attention>::value,
    "ggml_flash_attn_ext, which reads the cache, has other arguments");

// buffer types and buffers
KVQ_FACT(ggml_backend_buffer_type_i, get_name, const char * (*)(buft_t));
KVQ_FACT(ggml_backend_buffer_type_i, alloc_buffer, buffer_t (*)(buft_t, size_t));
KVQ_FACT(ggml_backend_buffer_type_i, get_alignment, size_t (*)(buft_t));
KVQ_FACT(ggml_backend_buffer_type_i, get_alloc_size, size_t (*)(buft_t, const struct ggml_tensor *));
KVQ_FACT(ggml_backend_buffer_type_i, is_host, bool (*)(buft_t));
KVQ_FACT(ggml_backend_buffer_i, free_buffer, void (*)(buffer_t));
KVQ_FACT(ggml_backend_buffer_i, get_base, void * (*)(buffer_t));
KVQ_FACT(ggml_backend_buffer_i, memset_tensor, void (*)(buffer_t, struct ggml_tensor *, uint8_t, size_t, size_t));
KVQ_FACT(ggml_backend_buffer_i, set_tensor, void (*)(buffer_t, struct ggml_tensor *, const void *, size_t, size_t));
KVQ_FACT(ggml_backend_buffer_i, get_tensor, void (*)(buffer_t, const struct ggml_tensor *, void *, size_t, size_t));
KVQ_FACT(ggml_backend_buffer_i, cpy_tensor, bool (*)(buffer_t, const struct ggml_tensor *, struct ggml_tensor *));
KVQ_FACT(ggml_backend_buffer_i, clear, void (*)(buffer_t, uint8_t));
KVQ_FACT(ggml_backend_buffer, buft, buft_t);
KVQ_FACT(ggml_backend_buffer, context, void *);
KVQ_FACT(ggml_backend_buffer, size, size_t);

// backends, devices, the registry
KVQ_FACT(ggml_backend_i, get_name, const char * (*)(ggml_backend_t));
KVQ_FACT(ggml_backend_i, free, void (*)(ggml_backend_t));
KVQ_FACT(ggml_backend_i, synchronize, void (*)(ggml_backend_t));
KVQ_FACT(
    ggml_backend_i, set_tensor_async, void (*)(ggml_backend_t, struct ggml_tensor *, const void *, size_t, size_t));
KVQ_FACT(
    ggml_backend_i, get_tensor_async, void (*)(ggml_backend_t, const struct ggml_tensor *, void *, size_t, size_t));
KVQ_FACT(ggml_backend_i, graph_compute, enum ggml_status (*)(ggml_backend_t, struct ggml_cgraph *));
KVQ_FACT(ggml_backend_device_i, get_name, const char * (*)(dev_t_));
KVQ_FACT(ggml_backend_device_i, get_description, const char * (*)(dev_t_));
KVQ_FACT(ggml_backend_device_i, get_memory, void (*)(dev_t_, size_t *, size_t *));
KVQ_FACT(ggml_backend_device_i, get_type, enum ggml_backend_dev_type (*)(dev_t_));
KVQ_FACT(ggml_backend_device_i, get_props, void (*)(dev_t_, struct ggml_backend_dev_props *));
KVQ_FACT(ggml_backend_device_i, init_backend, ggml_backend_t (*)(dev_t_, const char *));
KVQ_FACT(ggml_backend_device_i, get_buffer_type, buft_t (*)(dev_t_));
KVQ_FACT(ggml_backend_device_i, supports_op, bool (*)(dev_t_, const struct ggml_tensor *));
KVQ_FACT(ggml_backend_device_i, supports_buft, bool (*)(dev_t_, buft_t));
KVQ_FACT(ggml_backend_reg_i, get_name, const char * (*)(ggml_backend_reg_t));
KVQ_FACT(ggml_backend_reg_i, get_device_count, size_t (*)(ggml_backend_reg_t));
KVQ_FACT(ggml_backend_reg_i, get_device, dev_t_ (*)(ggml_backend_reg_t, size_t));
KVQ_FACT(ggml_backend_reg_i, get_proc_address, void * (*)(ggml_backend_reg_t, const char *) );

// what the Python package sets in llama.cpp's parameters; of the others it learns offsets from probe.cpp
KVQ_FACT(llama_model_params, devices, ggml_backend_dev_t *);
KVQ_FACT(llama_model_params, n_gpu_layers, int32_t);
KVQ_FACT(llama_context_params, n_ctx, uint32_t);
KVQ_FACT(llama_context_params, n_batch, uint32_t);
KVQ_FACT(llama_context_params, n_ubatch, uint32_t);
KVQ_FACT(llama_context_params, n_seq_max, uint32_t);
KVQ_FACT(llama_context_params, flash_attn_type, enum llama_flash_attn_type);
KVQ_FACT(llama_context_params, type_k, enum ggml_type);
KVQ_FACT(llama_context_params, type_v, enum ggml_type);

// Numbers that are the same in every known version (layouts.inc): the library serves them all, so a tree in which one
// differs is refused.
#define KVQ_MEMBER(type, member, n)                                                                                    \
    static_assert(offsetof(type, member) == n, #type "::" #member " is not at byte " #n);
#define KVQ_SIZE(type, n) static_assert(sizeof(type) == n, #type " has not " #n " bytes");
#define KVQ_CONSTANT(name, n) static_assert((int) (name) == (n), #name " is not " #n);
#define KVQ_DIFFERS(...)
#define KVQ_LAYOUT_OF(...)
#include "layouts.inc"
