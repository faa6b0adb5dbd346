// The numbers of a model's layers, and what methods make of them: a model whose layers lie in several caches
// (on several devices, or sliding-window layers apart) gets the plans that one cache gives it, but for pairs of
// layers that are cut apart.
#include "cache/cache.h"
#include "check.h"

#include "ggml.h"
#include "gguf.h"

#include <cstring>
#include <functional>
#include <map>
#include <unistd.h>

// Writes a model's header; tensors_of: names of layer il's tensors.
using names = std::vector<std::string>;
using names_of = std::function<names(int)>;

static std::string model(
    const char * name, int n_layer, const std::vector<int32_t> & heads, const names_of & tensors_of, int n_split = 0) {
    const std::string path = "/tmp/kvq-layers-" + std::to_string(getpid()) + "-" + name + ".gguf";
    gguf_context * g = gguf_init_empty();
    ggml_context * ctx = ggml_init({ 1 << 22, nullptr, false });
    gguf_set_val_str(g, "general.architecture", "test");
    gguf_set_val_u32(g, "test.block_count", (uint32_t) n_layer);
    gguf_set_val_u32(g, "test.embedding_length", 256);
    gguf_set_val_u32(g, "test.attention.head_count", 4);
    if (heads.size() == 1) {
        gguf_set_val_u32(g, "test.attention.head_count_kv", (uint32_t) heads[0]);
    } else {
        gguf_set_arr_data(g, "test.attention.head_count_kv", GGUF_TYPE_INT32, heads.data(), heads.size());
    }
    if (n_split) { gguf_set_val_u16(g, "split.count", (uint16_t) n_split); }
    for (int il = 0; il < n_layer; il++) {
        for (const std::string & t : tensors_of(il)) {
            ggml_tensor * x = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 1);
            ggml_set_name(x, ("blk." + std::to_string(il) + "." + t).c_str());
            gguf_add_tensor(g, x);
        }
    }
    CHECK(gguf_write_to_file(g, path.c_str(), false), "%s", path.c_str());
    gguf_free(g);
    ggml_free(ctx);
    return path;
}

static kvq_model_info info(const std::string & path) {
    kvq_model_info m;
    std::string err;
    CHECK(kvq_read_model_info(path, m, err) == KVQ_OK, "%s", err.c_str());
    unlink(path.c_str());
    return m;
}

static void numbers(void) {
    const auto plain = [](int) { return names{ "attn_q.weight", "attn_k.weight", "ffn_up.weight" }; };
    const auto fused = [](int) { return names{ "attn_qkv.weight" }; };
    const auto hybrid = [](int il) {
        return il % 4 == 3 ? names{ "attn_k.weight" } : names{ "attn_qkv.weight", "ssm_a" };
    };
    const auto both = [](int) { return names{ "attn_k.weight", "ssm_a" }; };
    const auto latent = [](int) { return names{ "attn_kv_a_mqa.weight" }; };
    const auto nothing = [](int) { return names{ "ssm_in.weight" }; };
    for (const auto & of : { +plain, +fused, +both, +latent, +nothing }) {
        const kvq_model_info m = info(model("all", 6, { 2 }, of));
        CHECK(m.attends.empty() && m.n_attention() == 6 && m.number_of(4) == 4, "every layer counts");
    }
    const std::vector<int32_t> heads = { 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 2 };
    const kvq_model_info by_names = info(model("hybrid", 12, { 2 }, hybrid)),
                         by_heads = info(model("heads", 12, heads, plain));
    for (const kvq_model_info & m : { by_names, by_heads }) {
        CHECK(m.n_attention() == 3, "%d", m.n_attention());
        CHECK(m.number_of(3) == 0 && m.number_of(7) == 1 && m.number_of(11) == 2, "%d", m.number_of(11));
    }
    const auto a_third = [&](int il) { return il < 4 ? plain(il) : names(); };
    const kvq_model_info part = info(model("part", 12, { 2 }, a_third, 3));
    CHECK(part.n_attention() == 12 && part.number_of(9) == 9, "the first of three files names a third of the tensors");
}

// plans of these layers, in caches that hold some each
// Heads of windowed layers are half as wide as the others, as in Gemma 4: half of a wide layer's heads are as wide as
// all of a windowed one's. The file says which layer is which, in flags or in whole numbers, or it does not say.
static void windows(void) {
    const auto file = [](int kind) {
        const std::string path = "/tmp/kvq-windows-" + std::to_string(getpid()) + ".gguf";
        gguf_context * g = gguf_init_empty();
        gguf_set_val_str(g, "general.architecture", "test");
        for (const auto & [key, n] : std::map<std::string, uint32_t>{ { "block_count", 2 }, { "embedding_length", 256 },
                 { "attention.head_count", 4 }, { "attention.head_count_kv", 2 }, { "attention.key_length", 512 },
                 { "attention.value_length", 512 }, { "attention.key_length_swa", 256 } }) {
            gguf_set_val_u32(g, ("test." + key).c_str(), n);
        }
        const bool flags[2] = { true, false };
        const int32_t numbers[2] = { 1, 0 };
        const char * key = "test.attention.sliding_window_pattern";
        if (kind == 1) { gguf_set_arr_data(g, key, GGUF_TYPE_BOOL, flags, 2); }
        if (kind == 2) { gguf_set_arr_data(g, key, GGUF_TYPE_INT32, numbers, 2); }
        CHECK(gguf_write_to_file(g, path.c_str(), true), "%s", path.c_str());
        gguf_free(g);
        return path;
    };
    const auto part = [](const kvq_model_info & m, int il, int n_embd_k) {
        kvq_draft_layer d;
        d.il = il;
        d.n_embd_k = d.n_embd_v = n_embd_k;
        return kvq_is_part(m, d);
    };
    for (int kind = 0; kind < 3; kind++) {
        const kvq_model_info m = info(file(kind));
        CHECK(m.key_of(0) == (kind ? 256 : 0) && m.key_of(1) == (kind ? 512 : 0), "%d", kind);
        CHECK(part(m, 1, 512) == (kind > 0), "half of a wide layer, %d", kind);
        CHECK(!part(m, 0, 512) && part(m, 0, 256) && !part(m, 1, 1024), "%d", kind);
        if (kind) { CHECK(kvq_guess_shape(m, 0, 512, 512).n_head_kv == 2, "%d", kind); }
        CHECK(kvq_guess_shape(m, 1, 512, 512).n_head_kv == 1, "%d", kind);
    }
}

static std::vector<kvq_draft_layer> plans(
    const std::string & path, const char * method, const char * opts, const std::vector<std::vector<int>> & caches) {
    CHECK(kvq_configure(method, opts, nullptr, path.c_str()) == KVQ_OK, "%s", kvq_last_error());
    const kvq_declared f16[2];
    std::vector<kvq_draft_layer> out;
    for (const auto & layers : caches) {
        kvq_cache_draft announced, known;
        for (const int il : layers) {
            for (const char * side : { "k", "v" }) {
                const std::string name = std::string("cache_") + side + "_l" + std::to_string(il);
                CHECK(announced.add(name.c_str(), 128, 512, 1, {}), "%s", announced.error().c_str());
            }
            CHECK(known.add_known({ il, 2, 64, 64 }, 0, 512, 1, f16), "%s", known.error().c_str());
        }
        for (size_t i = 0; i < layers.size(); i++) { // announced by size queries or found in a graph: one plan
            const kvq_draft_layer &a = announced.layers[i], &b = known.layers[i];
            CHECK(a.k.bytes() == b.k.bytes() && a.v.bytes() == b.v.bytes() && a.number == b.number, "layer %d", a.il);
            out.push_back(a);
        }
    }
    kvq_configure(nullptr, nullptr, nullptr, nullptr);
    return out;
}

static bool says(const kvq_layer_plan & plan, const char * key) {
    const kvq_part * part = plan.part("share_codes");
    return part && part->get(key) > 0;
}
static bool shares(const kvq_layer_plan & plan, bool value) { return says(plan, value ? "v" : "k"); }
static bool apart(const kvq_layer_plan & plan, bool value) { return says(plan, value ? "v_apart" : "k_apart"); }

static void splits(void) {
    const std::string path = model("split", 12, { 2 }, [](int) { return names{ "attn_k.weight" }; });
    const std::vector<int> all = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 };
    const struct {
        const char *method, *opts;
    } methods[] = {
        { "xquant", "" },
        { "xquant", "preset=1.16" },
        { "xquant", "shared=none" },
        { "minikv", "budget=pyramid" },
        { "zipcache", "" },
        { "kivi", "" },
        { "higgs", "" },
        { "aqua", "predictor=none" },
    };
    for (const auto & m : methods) {
        const auto one = plans(path, m.method, m.opts, { all });
        for (int cut = 1; cut < 12; cut++) {
            const std::vector<int> low(all.begin(), all.begin() + cut), high(all.begin() + cut, all.end());
            const auto two = plans(path, m.method, m.opts, { low, high });
            for (int il = 0; il < 12; il++) {
                const kvq_layer_plan &a = one[(size_t) il].plan, &b = two[(size_t) il].plan;
                const bool cut_apart = il == cut && cut % 2 && !strcmp(m.method, "xquant");
                for (int v = 0; v < 2; v++) {
                    const kvq_codec &x = v ? a.v : a.k, &y = v ? b.v : b.k;
                    const bool shared = shares(a, v) || !x.bits; // by codes, or left without them
                    CHECK(!apart(a, v), "%s: one cache cuts nothing apart", m.method);
                    if (cut_apart && shared) {
                        CHECK(apart(b, v) && !shares(b, v) && y.bits, "%s %s: layer %d", m.method, m.opts, il);
                    } else {
                        CHECK(!memcmp(&x, &y, sizeof(x)) && shares(a, v) == shares(b, v) && !apart(b, v),
                            "%s %s: layer %d, cut at %d", m.method, m.opts, il, cut);
                    }
                }
                for (const char * name : { "probe", "evict", "choose" }) {
                    const kvq_part *x = a.part(name), *y = b.part(name);
                    CHECK(!x == !y && (!x || x->values == y->values), "%s: %s of layer %d", m.method, name, il);
                }
            }
        }
    }
    // every third layer sees everything, in a cache of its own: 2 5 8 11, the others 0 1 3 4 6 7 9 10
    const auto parts = plans(path, "xquant", "vm=0,km=0", { { 2, 5, 8, 11 }, { 0, 1, 3, 4, 6, 7, 9, 10 } });
    for (const kvq_draft_layer & d : parts) {
        const bool pair = d.il == 1 || d.il == 7;
        CHECK(shares(d.plan, true) == pair && apart(d.plan, true) == (d.il % 2 && !pair), "layer %d", d.il);
    }
    unlink(path.c_str());
}

int main() {
    numbers();
    windows();
    splits();
    printf("layers: ok\n");
    return 0;
}
