// Caches of clients on other machines. llama.cpp's RPC server hands us a client's requests, and three things
// differ from a program that runs here: a buffer is asked for by its size alone, without a size query for each
// tensor; every node of the client's graph for this device comes here, weights included; views that come alone,
// not in a graph, have lost their parent.
//   So a KV cache shows itself in the first graph that attends over it: tensors cache_k_l<il>, cache_v_l<il> in
// a buffer that was plain so far. Its layers are built from the graph, which knows their heads; rows that were
// set before (a restored state) are moved over, and the plain memory is given back.
#include "backend.h"
#include "engines.h"
#include "cache/lines.h"

#include "engine/host.h"

#include "ggml-impl.h" // ggml_cgraph

#include <cstdio>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

static const ggml_tensor * root_of(const ggml_tensor * t) { return t->view_src ? t->view_src : t; }

static kvq_buffer * buffer_of(const ggml_tensor * root) { return (kvq_buffer *) root->buffer->context; }

// in a buffer of ours that was not announced as a cache's: asked of many nodes, so without its name
static bool is_plain(const ggml_tensor * root) {
    ggml_backend_buffer_t b = root->buffer;
    return b && kvq_buft_is_ours(b->buft) && b->context && b->size && !buffer_of(root)->announced;
}

// of a tensor that is named as a cache's, -1: of any other
static int layer_of(const ggml_tensor * root) {
    const kvq_lane_id id = kvq_parse_cache_name(root->name);
    return id.tag.empty() ? id.il : -1;
}

static bool has_layer(const ggml_tensor * root, int il) {
    return buffer_of(root)->cache && buffer_of(root)->cache->layer(il);
}

static kvq_device_context & device_of(const kvq_backend_context & b) {
    return *(kvq_device_context *) b.device->context;
}

void kvq_note_written(kvq_buffer & b, const ggml_tensor * tensor, size_t offset, size_t size) {
    if (layer_of(tensor) < 0) { return; }
    if (!b.found) { b.found.reset(new kvq_found_cache); }
    auto & written = b.found->written;
    char * at = (char *) tensor->data + offset;
    if (!written.empty() && written.back().first + written.back().second == at) {
        written.back().second += size;
    } else {
        written.push_back({ at, size });
    }
}

// ---------------------------------------------------------------- a layer

// Rows that were set while the memory was plain go to the lane; then the memory goes back, and an access to it faults.
static void move_over(kvq_buffer & b, const ggml_tensor * root) {
    char *first = (char *) root->data, *end = first + ggml_nbytes(root);
    for (const auto & w : b.found->written) {
        char *from = std::max(w.first, first), *to = std::min(w.first + w.second, end);
        if (from >= to) { continue; }
        const size_t at = (size_t) (from - first);
        std::vector<char> rows((size_t) (to - from));
        if (b.inner) {
            kvq_cuda_settle_inputs(b, from, rows.size());
            b.inner->iface.get_tensor(b.inner, root, rows.data(), at, rows.size());
        } else {
            memcpy(rows.data(), from, rows.size());
        }
        root->buffer->iface.set_tensor(root->buffer, const_cast<ggml_tensor *>(root), rows.data(), at, rows.size());
    }
    if (!b.inner) {
        const uintptr_t page = (uintptr_t) sysconf(_SC_PAGESIZE);
        const uintptr_t lo = ((uintptr_t) first + page - 1) / page * page, hi = (uintptr_t) end / page * page;
        if (lo < hi) { // pages at the ends may be shared with the neighbours
            madvise((void *) lo, hi - lo, MADV_DONTNEED);
            mprotect((void *) lo, hi - lo, PROT_NONE);
        }
    }
}

// "" when the layer is there, else why it cannot be
static std::string find_layer(kvq_backend_context & b, const ggml_tensor * attention) {
    const ggml_tensor *k = attention->src[1], *v = attention->src[2], *kr = root_of(k), *vr = root_of(v);
    const int latent = vr == kr ? (int) v->ne[0] : 0; // values are a view of the keys
    const kvq_lane_id id_k = kvq_parse_cache_name(kr->name), id_v = kvq_parse_cache_name(vr->name);
    const kvq_layer_shape shape = { id_k.il, (int) k->ne[2], (int) k->ne[0], (int) v->ne[0] };
    const std::string name = "layer " + std::to_string(shape.il);
    if (id_k.value || (!latent && (!id_v.value || id_k.il != id_v.il || vr->buffer != kr->buffer))) {
        return name + " attends over keys and values of different places: run this model without --kv-method";
    }
    if (shape.n_head_kv * shape.head_size_k != kr->ne[0] ||
        (!latent && shape.n_head_kv * shape.head_size_v != vr->ne[0])) {
        return name + " attends over " + std::to_string(shape.n_head_kv) + " heads of " +
            std::to_string(shape.head_size_k) + ", its rows have " + std::to_string(kr->ne[0]) +
            " channels: run this model without --kv-method";
    }
    kvq_buffer & buffer = *buffer_of(kr);
    if (!buffer.found) { buffer.found.reset(new kvq_found_cache); }
    kvq_found_cache & found = *buffer.found;
    const int last = found.draft.layers.empty() ? -1 : found.draft.layers.back().il;
    if (last >= shape.il) {
        return name + " comes after layer " + std::to_string(last) + ": layers of a cache must be in order";
    }
    found.draft.beside_host = b.inner != nullptr; // place=auto: what the card has left was not asked before
    const kvq_declared declared[2] = { kvq_declared_of(kr->type), kvq_declared_of(vr->type) };
    if (!found.draft.add_known(shape, latent, (int) kr->ne[1], (int) kr->ne[2], declared)) {
        return "of a client, " + found.draft.error();
    }
    const kvq_draft_layer & d = found.draft.layers.back();
    if (b.inner) {
        if (const char * why = kvq_cuda_refuse(d)) { return name + ": " + why; }
    }
    bool ok = true;
    if (buffer.cache) {
        ok = buffer.cache->append(d);
    } else {
        buffer.cache.reset(new kvq_kv_cache(found.draft, kvq_device_of(device_of(b), buffer)));
    }
    if (!ok || !buffer.cache->ok()) {
        return name + " of a client's KV cache cannot be allocated: lower -c there, and keep its warm-up on";
    }
    kvq_kv_layer & layer = *buffer.cache->layers.back();
    layer.base[0] = (const char *) kr->data;
    layer.base[1] = (const char *) vr->data; // of latent attention the keys'
    buffer.cache->device_name = device_of(b).name;
    for (const ggml_tensor * root : { kr, vr }) {
        if (root == kr || !latent) {
            move_over(buffer, root);
            found.nb_known += kvq_pad(ggml_nbytes(root), KVQ_ALIGN);
        }
    }
    return "";
}

// ---------------------------------------------------------------- a graph

bool kvq_find_caches(kvq_backend_context & b, const ggml_cgraph * graph) {
    std::string why;
    try {
        for (int i = 0; i < graph->n_nodes && why.empty(); i++) {
            const ggml_tensor * node = graph->nodes[i];
            if (node->op != GGML_OP_FLASH_ATTN_EXT) { continue; }
            const ggml_tensor * root = root_of(node->src[1]);
            if (!is_plain(root)) { continue; }
            const int il = layer_of(root);
            if (il < 0) { continue; }
            const bool is_new = !has_layer(root, il);
            if (is_new) { why = find_layer(b, node); }
            kvq_buffer & buffer = *buffer_of(root);
            kvq_found_cache * found = buffer.found.get();
            if (!why.empty() || !found || found->said || (is_new && found->nb_known < root->buffer->size)) {
                continue; // others may follow: with weights left on the client a graph comes in parts
            }
            found->said = true;
            found->written.clear();
            if (buffer.inner && found->nb_known >= root->buffer->size) { // its addresses stay names of tensors
                ggml_backend_synchronize(b.inner);
                ggml_backend_buffer_free(buffer.inner);
                buffer.inner = nullptr;
            }
            kvq_say(buffer.cache->load_line());
        }
        for (int i = 0; i < graph->n_nodes && why.empty(); i++) {
            const ggml_tensor * node = graph->nodes[i];
            if (node->op != GGML_OP_SET_ROWS || !is_plain(root_of(node))) { continue; }
            const int il = layer_of(root_of(node));
            if (il >= 0 && !has_layer(root_of(node), il)) {
                why = std::string(root_of(node)->name) + " is read without flash attention: run the client with -fa on";
            }
        }
    } catch (const std::bad_alloc &) { why = "out of memory for the KV cache of a client: lower -c there"; }
    if (!why.empty()) { kvq_report_error(why); }
    return why.empty();
}
