// Two halves. Structures with functions: each word of one is filled with another function of ours, ggml's accessor is
// called, and which function it reached is the place of the member. Tensors, nodes and graphs: built by ggml's
// constructors from values that are all different, in a context without memory, and read as graph.cpp reads them.
#include "self_check.h"

#include "op_params.h"
#include "process.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h" // ggml_cgraph

#include <array>
#include <memory>
#include <utility>

namespace {

// ---------------------------------------------------------------- places of functions

constexpr int N_WORDS = 40;
// What every function of ours returns. As the size of a tensor it has to be the right one, and none of the callers
// follows it as a pointer.
constexpr size_t RETURNED = 64 * 3 * 5 * 2 * 2;
int reached = -1;

template <int I> size_t word() {
    reached = I;
    return RETURNED;
}
template <int... I> std::array<void *, sizeof...(I)> make_words(std::integer_sequence<int, I...>) {
    return { { (void *) &word<I>... } };
}
const std::array<void *, N_WORDS> & words() {
    static const std::array<void *, N_WORDS> all = make_words(std::make_integer_sequence<int, N_WORDS>());
    return all;
}

// Which word holds this function; -1: none.
int place_of(const void * function) {
    for (int i = 0; i < N_WORDS; i++) {
        if (words()[(size_t) i] == function) { return i; }
    }
    return -1;
}

struct checker {
    std::string & err;
    bool ok = true;

    void fail(const std::string & what) {
        if (!ok) { return; }
        ok = false;
        err = "ggml " + kvq_layout_here.version + " (" + kvq_ggml_file() + "): " + what +
            ", so libggml-kvq.so cannot serve it; it knows " + kvq_known_versions();
    }

    // `call` has to reach the function at byte `at` of its structure
    template <typename F> void place(const char * member, size_t at, F call) {
        if (!ok) { return; }
        reached = -1;
        call();
        found(member, at, reached);
    }
    void found(const char * member, size_t at, int word) {
        if (!ok || word == (int) (at / 8)) { return; }
        fail(std::string(member) + " is " + (word < 0 ? "not called" : "at byte " + std::to_string(8 * word)) +
            ", not " + (word < 0 ? "at byte " : "at ") + std::to_string(at));
    }
    template <typename A, typename B> void equal(const char * what, const A & got, const B & want) {
        if (ok && !(got == want)) { fail(std::string(what) + " is not where it is read"); }
    }
};

void check_buffer_type(checker & c, const ggml_tensor * t) {
    std::array<void *, N_WORDS> s = words();
    const auto buft = (ggml_backend_buffer_type_t) s.data();
    const kvq_layout & l = kvq_layout_here;
    using type = ggml_backend_buffer_type;
    c.place(
        "ggml_backend_buffer_type_i::get_name", offsetof(type, iface.get_name), [&] { ggml_backend_buft_name(buft); });
    c.place("ggml_backend_buffer_type_i::alloc_buffer", offsetof(type, iface.alloc_buffer),
        [&] { ggml_backend_buft_alloc_buffer(buft, 1); });
    c.place(
        "ggml_backend_buffer_type_i::get_alignment", l.get_alignment, [&] { ggml_backend_buft_get_alignment(buft); });
    c.place("ggml_backend_buffer_type_i::get_max_size", l.get_max_size, [&] { ggml_backend_buft_get_max_size(buft); });
    c.place("ggml_backend_buffer_type_i::get_alloc_size", l.get_alloc_size,
        [&] { ggml_backend_buft_get_alloc_size(buft, t); });
    c.place("ggml_backend_buffer_type_i::is_host", l.is_host, [&] { ggml_backend_buft_is_host(buft); });
    if (c.ok) {
        c.found("ggml_backend_buffer_type::device", l.device, place_of((void *) ggml_backend_buft_get_device(buft)));
    }
}

void check_buffer(checker & c, ggml_tensor * t) {
    std::array<void *, N_WORDS> type = words(), context = {};
    ggml_backend_buffer_i iface;
    memcpy((void *) &iface, words().data(), sizeof(iface));
    const auto buft = (ggml_backend_buffer_type_t) type.data();
    const size_t size = 1 << 20;
    ggml_backend_buffer_t buffer = ggml_backend_buffer_init(buft, iface, context.data(), size);
    using i = ggml_backend_buffer_i;
    c.equal("ggml_backend_buffer::buft", buffer->buft, buft);
    c.equal("ggml_backend_buffer::context", buffer->context, (void *) context.data());
    c.equal("ggml_backend_buffer::size", buffer->size, size);
    c.equal("ggml_backend_buffer::buft, which ggml_backend_buffer_get_type gives,",
        ggml_backend_buffer_get_type(buffer), buft);
    c.equal("ggml_backend_buffer::size, which ggml_backend_buffer_get_size gives,",
        ggml_backend_buffer_get_size(buffer), size);
    c.place("ggml_backend_buffer_i::get_base", offsetof(i, get_base), [&] { ggml_backend_buffer_get_base(buffer); });
    c.place("ggml_backend_buffer_i::clear", offsetof(i, clear), [&] { ggml_backend_buffer_clear(buffer, 0); });
    if (c.ok) { ggml_backend_tensor_alloc(buffer, t, (void *) (2 * RETURNED)); }
    c.equal("ggml_tensor::buffer", t->buffer, buffer);
    c.equal("ggml_tensor::data", t->data, (void *) (2 * RETURNED));
    char bytes[4] = {};
    c.place(
        "ggml_backend_buffer_i::set_tensor", offsetof(i, set_tensor), [&] { ggml_backend_tensor_set(t, bytes, 0, 4); });
    c.place(
        "ggml_backend_buffer_i::get_tensor", offsetof(i, get_tensor), [&] { ggml_backend_tensor_get(t, bytes, 0, 4); });
    c.place("ggml_backend_buffer_i::memset_tensor", offsetof(i, memset_tensor),
        [&] { ggml_backend_tensor_memset(t, 0, 0, 4); });
    c.place("ggml_backend_buffer_i::free_buffer", offsetof(i, free_buffer), [&] {
        ggml_backend_buffer_free(buffer);
        buffer = nullptr;
    });
    if (buffer) {
        iface = {};
        memcpy((void *) &buffer->iface, (void *) &iface, sizeof(iface));
        ggml_backend_buffer_free(buffer);
    }
}

void check_device(checker & c, const ggml_tensor * t) {
    std::array<void *, N_WORDS> s = words();
    const auto dev = (ggml_backend_dev_t) s.data();
    using d = ggml_backend_device;
    size_t n[2];
    alignas(16) char props[512];
    c.place("ggml_backend_device_i::get_name", offsetof(d, iface.get_name), [&] { ggml_backend_dev_name(dev); });
    c.place("ggml_backend_device_i::get_description", offsetof(d, iface.get_description),
        [&] { ggml_backend_dev_description(dev); });
    c.place("ggml_backend_device_i::get_memory", offsetof(d, iface.get_memory),
        [&] { ggml_backend_dev_memory(dev, n, n + 1); });
    c.place("ggml_backend_device_i::get_type", offsetof(d, iface.get_type), [&] { (void) ggml_backend_dev_type(dev); });
    c.place("ggml_backend_device_i::get_props", offsetof(d, iface.get_props),
        [&] { ggml_backend_dev_get_props(dev, (ggml_backend_dev_props *) props); });
    c.place("ggml_backend_device_i::init_backend", offsetof(d, iface.init_backend),
        [&] { ggml_backend_dev_init(dev, nullptr); });
    c.place("ggml_backend_device_i::get_buffer_type", offsetof(d, iface.get_buffer_type),
        [&] { ggml_backend_dev_buffer_type(dev); });
    c.place("ggml_backend_device_i::get_host_buffer_type", offsetof(d, iface.get_host_buffer_type),
        [&] { ggml_backend_dev_host_buffer_type(dev); });
    c.place("ggml_backend_device_i::supports_op", offsetof(d, iface.supports_op),
        [&] { ggml_backend_dev_supports_op(dev, t); });
    c.place("ggml_backend_device_i::supports_buft", offsetof(d, iface.supports_buft),
        [&] { ggml_backend_dev_supports_buft(dev, nullptr); });
    c.place("ggml_backend_device_i::offload_op", offsetof(d, iface.offload_op),
        [&] { ggml_backend_dev_offload_op(dev, t); });
    if (c.ok) {
        c.found("ggml_backend_device::reg", offsetof(d, reg), place_of((void *) ggml_backend_dev_backend_reg(dev)));
    }
}

void check_registry(checker & c) {
    std::array<void *, N_WORDS> s = words();
    const auto reg = (ggml_backend_reg_t) s.data();
    using r = ggml_backend_reg;
    c.place("ggml_backend_reg_i::get_name", offsetof(r, iface.get_name), [&] { ggml_backend_reg_name(reg); });
    c.place("ggml_backend_reg_i::get_device_count", offsetof(r, iface.get_device_count),
        [&] { ggml_backend_reg_dev_count(reg); });
    c.place("ggml_backend_reg_i::get_device", offsetof(r, iface.get_device), [&] { ggml_backend_reg_dev_get(reg, 0); });
    c.place("ggml_backend_reg_i::get_proc_address", offsetof(r, iface.get_proc_address),
        [&] { ggml_backend_reg_get_proc_address(reg, ""); });
}

void check_backend(checker & c, ggml_tensor * t, ggml_cgraph * graph) {
    std::array<void *, N_WORDS> s = words();
    const auto backend = (ggml_backend_t) s.data();
    using b = ggml_backend;
    char bytes[4] = {};
    c.place("ggml_backend_i::get_name", offsetof(b, iface.get_name), [&] { ggml_backend_name(backend); });
    c.place("ggml_backend_i::set_tensor_async", offsetof(b, iface.set_tensor_async),
        [&] { ggml_backend_tensor_set_async(backend, t, bytes, 0, 4); });
    c.place("ggml_backend_i::get_tensor_async", offsetof(b, iface.get_tensor_async),
        [&] { ggml_backend_tensor_get_async(backend, t, bytes, 0, 4); });
    c.place("ggml_backend_i::synchronize", offsetof(b, iface.synchronize), [&] { ggml_backend_synchronize(backend); });
    c.place("ggml_backend_i::graph_compute", offsetof(b, iface.graph_compute),
        [&] { (void) ggml_backend_graph_compute_async(backend, graph); });
    c.place("ggml_backend_i::free", offsetof(b, iface.free), [&] { ggml_backend_free(backend); });
    if (!c.ok) { return; }
    c.found("ggml_backend::device", offsetof(b, device), place_of((void *) ggml_backend_get_device(backend)));
    c.found("ggml_backend::guid", offsetof(b, guid), place_of((void *) ggml_backend_guid(backend)));
}

// ---------------------------------------------------------------- tensors and nodes

struct free_context {
    void operator()(ggml_context * ctx) const { ggml_free(ctx); }
};
using context = std::unique_ptr<ggml_context, free_context>;

bool has_shape(const ggml_tensor * t, std::array<int64_t, 4> ne, std::array<size_t, 4> nb) {
    return !memcmp(t->ne, ne.data(), sizeof(ne)) && !memcmp(t->nb, nb.data(), sizeof(nb));
}

// t: f16 [64, 3, 5, 2]
void check_tensor(checker & c, ggml_context * ctx, ggml_tensor * t) {
    const size_t header = 32; // ggml_object, of which one lies before each tensor
    c.equal("the end of ggml_tensor", ggml_tensor_overhead(), sizeof(ggml_tensor) + header);
    c.equal("ggml_tensor::type", t->type, GGML_TYPE_F16);
    c.equal("ggml_tensor::ne or ::nb", has_shape(t, { { 64, 3, 5, 2 } }, { { 2, 128, 384, 1920 } }), true);
    c.equal("ggml_tensor::op", t->op, GGML_OP_NONE);
    ggml_set_name(t, "cache_k_l7");
    c.equal("ggml_tensor::name", std::string(t->name, strnlen(t->name, GGML_MAX_NAME)), "cache_k_l7");
    const int before = t->flags;
    ggml_set_input(t);
    c.equal("ggml_tensor::flags (GGML_TENSOR_FLAG_INPUT)", t->flags, before | GGML_TENSOR_FLAG_INPUT);
    ggml_set_output(t);
    c.equal("ggml_tensor::flags (GGML_TENSOR_FLAG_OUTPUT)", t->flags,
        before | GGML_TENSOR_FLAG_INPUT | GGML_TENSOR_FLAG_OUTPUT);
    ggml_tensor * view = ggml_view_4d(ctx, t, 64, 2, 4, 1, 128, 384, 1920, 384);
    c.equal("ggml_tensor::view_src", view->view_src, t);
    c.equal("ggml_tensor::view_offs", view->view_offs, (size_t) 384);
    c.equal("the operand of ggml_view_4d", view->src[0], t);
    c.equal("the number of GGML_OP_VIEW", view->op, GGML_OP_VIEW);
    const ggml_tensor * turned = ggml_permute(ctx, view, 0, 2, 1, 3);
    c.equal("the strides of ggml_permute", has_shape(turned, { { 64, 4, 2, 1 } }, { { 2, 384, 128, 1920 } }), true);
    c.equal("the origin of a view of a view", turned->view_src, t);
    c.equal("the offset of a view of a view", turned->view_offs, (size_t) 384);
    c.equal("the number of GGML_OP_PERMUTE", turned->op, GGML_OP_PERMUTE);
    const ggml_type_traits * q8 = ggml_get_type_traits(GGML_TYPE_Q8_0);
    c.equal("ggml_type_traits", q8->blck_size == 32 && q8->type_size == 34 && q8->to_float, true);
}

void check_set_rows(checker & c, ggml_context * ctx) {
    ggml_tensor * cache = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, 64, 10, 1, 1);
    ggml_tensor * rows = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 64, 3, 1, 1);
    ggml_tensor * cells = ggml_new_tensor_4d(ctx, GGML_TYPE_I64, 3, 1, 1, 1);
    const ggml_tensor * node = ggml_set_rows(ctx, cache, rows, cells);
    c.equal("the number of GGML_OP_SET_ROWS", node->op, GGML_OP_SET_ROWS);
    c.equal("the rows of ggml_set_rows", node->src[0], rows);
    c.equal("the cells of ggml_set_rows", node->src[1], cells);
    c.equal("the destination of ggml_set_rows", node->view_src, cache);
}

void check_attention(checker & c, ggml_context * ctx) {
    ggml_tensor * q = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 16, 64, 4, 1);
    ggml_tensor * k = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, 16, 32, 2, 1);
    ggml_tensor * v = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, 24, 32, 2, 1);
    ggml_tensor * mask = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, 32, 64, 1, 1);
    ggml_tensor * sinks = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 4, 1, 1, 1);
    ggml_tensor * node = ggml_flash_attn_ext(ctx, q, k, v, mask, 0.125f, 8.0f, 30.0f);
    ggml_flash_attn_ext_add_sinks(node, sinks);
    c.equal("the number of GGML_OP_FLASH_ATTN_EXT", node->op, GGML_OP_FLASH_ATTN_EXT);
    const ggml_tensor * want[5] = { q, k, v, mask, sinks };
    const char * names[5] = { "queries", "keys", "values", "mask", "sinks" };
    for (int i = 0; i < 5; i++) {
        c.equal(("operand " + std::string(names[i]) + " of ggml_flash_attn_ext").c_str(),
            (const ggml_tensor *) node->src[i], want[i]);
    }
    const kvq_attention_params p = kvq_attention_of(node);
    c.equal("parameter scale of ggml_flash_attn_ext", p.scale, 0.125f);
    c.equal("parameter max_bias of ggml_flash_attn_ext", p.max_bias, 8.0f);
    c.equal("parameter logit_softcap of ggml_flash_attn_ext", p.softcap, 30.0f);
    c.equal("the shape of ggml_flash_attn_ext", has_shape(node, { { 24, 4, 64, 1 } }, { { 4, 96, 384, 24576 } }), true);
}

void check_rope_params(checker & c, const ggml_tensor * node, const kvq_rope & want, const char * of) {
    const kvq_rope r = kvq_rope_of(node);
    const auto equal = [&](const char * name, auto got, auto wanted) {
        c.equal(("parameter " + std::string(name) + " of " + of).c_str(), got, wanted);
    };
    c.equal("the number of GGML_OP_ROPE", node->op, GGML_OP_ROPE);
    equal("n_dims", r.n_dims, want.n_dims);
    equal("n_ctx_orig", r.n_ctx_orig, want.n_ctx_orig);
    equal("mode", r.neox && r.interleaved == want.interleaved, true);
    equal("freq_base", r.freq_base, want.freq_base);
    equal("freq_scale", r.freq_scale, want.freq_scale);
    equal("ext_factor", r.ext_factor, want.ext_factor);
    equal("attn_factor", r.attn_factor, want.attn_factor);
    equal("beta_fast", r.beta_fast, want.beta_fast);
    equal("beta_slow", r.beta_slow, want.beta_slow);
    equal("sections", !memcmp(r.sections, want.sections, sizeof(r.sections)), true);
    equal("n_offs", kvq_rope_first(node), 0);
}

void check_rope(checker & c, ggml_context * ctx) {
    ggml_tensor * a = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 64, 2, 5, 1);
    ggml_tensor * positions = ggml_new_tensor_4d(ctx, GGML_TYPE_I32, 5, 1, 1, 1);
    ggml_tensor * four = ggml_new_tensor_4d(ctx, GGML_TYPE_I32, 20, 1, 1, 1);
    ggml_tensor * factors = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 32, 1, 1, 1);
    kvq_rope want;
    want.n_dims = 48;
    want.n_ctx_orig = 77;
    want.freq_base = 1.5f;
    want.freq_scale = 2.5f;
    want.ext_factor = 3.5f;
    want.attn_factor = 4.5f;
    want.beta_fast = 5.5f;
    want.beta_slow = 6.5f;
    const kvq_rope & w = want;
    ggml_tensor * node = ggml_rope_ext(ctx, a, positions, factors, w.n_dims, GGML_ROPE_TYPE_NEOX, w.n_ctx_orig,
        w.freq_base, w.freq_scale, w.ext_factor, w.attn_factor, w.beta_fast, w.beta_slow);
    check_rope_params(c, node, want, "ggml_rope_ext");
    c.equal("parameter mode of ggml_rope_ext", kvq_rope_mode(node), GGML_ROPE_TYPE_NEOX);
    c.equal("the rows of ggml_rope_ext", node->src[0], a);
    c.equal("the positions of ggml_rope_ext", node->src[1], positions);
    c.equal("the frequency factors of ggml_rope_ext", node->src[2], factors);
    using offset_setter = ggml_tensor * (*)(ggml_tensor *, int); // not in the headers of every version
    if (const auto set_offset = (offset_setter) kvq_optional_function("ggml_rope_set_offset")) {
        set_offset(node, 6);
        c.equal("parameter n_offs of ggml_rope_set_offset", kvq_rope_first(node), 6);
    }
    ggml_tensor * view = ggml_view_4d(ctx, a, 64, 1, 5, 1, 256, 512, 2560, 256);
    const ggml_tensor * shift = ggml_rope_ext_inplace(ctx, view, positions, nullptr, w.n_dims, GGML_ROPE_TYPE_NORMAL,
        w.n_ctx_orig, w.freq_base, w.freq_scale, w.ext_factor, w.attn_factor, w.beta_fast, w.beta_slow);
    c.equal("the rows of ggml_rope_ext_inplace", shift->src[0], view);
    c.equal("the origin of ggml_rope_ext_inplace", shift->view_src, a);
    for (const int mode : { GGML_ROPE_TYPE_MROPE, GGML_ROPE_TYPE_IMROPE }) {
        int sections[4] = { 11, 12, 13, 14 };
        memcpy(want.sections, sections, sizeof(sections));
        want.interleaved = mode == GGML_ROPE_TYPE_IMROPE;
        node = ggml_rope_multi(ctx, a, four, factors, w.n_dims, sections, mode, w.n_ctx_orig, w.freq_base, w.freq_scale,
            w.ext_factor, w.attn_factor, w.beta_fast, w.beta_slow);
        check_rope_params(c, node, want, "ggml_rope_multi");
        c.equal("the positions of ggml_rope_multi", node->src[1], four);
    }
}

void nothing(ggml_tensor *, int, int, void *) {}

void check_custom(checker & c, ggml_context * ctx) {
    ggml_tensor * args[2] = { ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 4, 1, 1, 1),
        ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 5, 1, 1, 1) };
    const ggml_tensor * node = ggml_custom_4d(ctx, GGML_TYPE_I8, 3, 1, 1, 1, args, 2, nothing, 3, &c);
    kvq_layout_here.op_custom = (int) node->op; // the one number of an operation that differs between versions
    const kvq_custom_params p = kvq_custom_of(node);
    c.equal("the callback of ggml_custom_4d", p.fun, (ggml_custom_op_t) nothing);
    c.equal("the tasks of ggml_custom_4d", p.n_tasks, 3);
    c.equal("the pointer of ggml_custom_4d", p.userdata, (void *) &c);
    c.equal("the operands of ggml_custom_4d", node->src[0] == args[0] && node->src[1] == args[1], true);
}

ggml_cgraph * check_graph(checker & c, ggml_context * ctx) {
    ggml_tensor * leaf = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, 8, 4, 2, 1);
    ggml_tensor * node = ggml_permute(ctx, leaf, 0, 2, 1, 3);
    ggml_cgraph * graph = ggml_new_graph_custom(ctx, 32, false);
    ggml_build_forward_expand(graph, node);
    c.equal("ggml_cgraph::size", graph->size, 32);
    c.equal("ggml_cgraph::n_nodes", graph->n_nodes, 1);
    c.equal("ggml_cgraph::n_leafs", graph->n_leafs, 1);
    c.equal("ggml_cgraph::n_nodes, which ggml_graph_n_nodes gives,", ggml_graph_n_nodes(graph), 1);
    if (c.ok) { c.equal("ggml_cgraph::nodes", graph->nodes[0], node); }
    if (c.ok) { c.equal("ggml_cgraph::leafs", graph->leafs[0], leaf); }
    c.equal("ggml_cgraph::uid", graph->uid, (uint64_t) 0);
    return graph;
}

} // namespace

bool kvq_check_ggml(std::string & err) {
    checker c = { err };
    const size_t size = 64 * ggml_tensor_overhead() + ggml_graph_overhead_custom(32, false);
    const context ctx(ggml_init({ size, nullptr, /*no_alloc =*/true }));
    ggml_tensor * t = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F16, 64, 3, 5, 2);
    check_tensor(c, ctx.get(), t);
    ggml_cgraph * graph = check_graph(c, ctx.get());
    check_set_rows(c, ctx.get());
    check_attention(c, ctx.get());
    check_rope(c, ctx.get());
    check_custom(c, ctx.get());
    check_registry(c);
    check_device(c, t);
    check_buffer_type(c, t);
    if (c.ok) { check_buffer(c, t); }
    if (c.ok) { check_backend(c, t, graph); }
    return c.ok;
}
