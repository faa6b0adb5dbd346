// A method was asked for and no cache came: llama.cpp placed its layers elsewhere (-dev none, -ngl 0, -nkvo, --fit).
// The library sees it when the scheduler asks who writes rows into a cache: that graph is built after all memory of a
// context is there.
#include "backend.h"
#include "base/settings.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

extern "C" int kvq_cache_count(void);

void kvq_note_absent(const ggml_tensor * op) {
    static std::atomic<bool> said{ false };
    if (op->op != GGML_OP_SET_ROWS || said) { return; }
    const ggml_tensor * root = op->view_src ? op->view_src : op;
    const char * method = kvq_setting_text(kvq_setting::METHOD);
    const kvq_lane_id id = kvq_parse_cache_name(root->name);
    if (!*method || id.il < 0 || !id.tag.empty() || kvq_cache_count() > 0 || !root->buffer || !root->buffer->size ||
        kvq_buft_is_ours(root->buffer->buft)) { // no size: --fit only measures
        return;
    }
    said = true;
    kvq_report_note(std::string("KVQ_METHOD=") + method +
        " is set and no cache landed on KVQ0, "
        "this context keeps llama.cpp's own: add -dev KVQ0 (and drop -ngl 0, -nkvo, or lower -c where --fit moved the "
        "layers)");
}
