// What becomes of a cache object by its tensors and the model's metadata: ours, llama.cpp's, or refused with a line.
#include "cache/cache.h"
#include "check.h"

#include "gguf.h"

#include <cstring>
#include <unistd.h>

using keys = std::vector<std::pair<const char *, uint32_t>>;

static std::string model(const keys & more) {
    const std::string path = "/tmp/kvq-caches-" + std::to_string(getpid()) + ".gguf";
    gguf_context * g = gguf_init_empty();
    gguf_set_val_str(g, "general.architecture", "test");
    const keys base = { { "block_count", 6 }, { "embedding_length", 256 }, { "attention.head_count", 4 },
        { "attention.head_count_kv", 2 } };
    for (const keys & part : { base, more }) {
        for (const auto & k : part) { gguf_set_val_u32(g, (std::string("test.") + k.first).c_str(), k.second); }
    }
    CHECK(gguf_write_to_file(g, path.c_str(), true), "%s", path.c_str());
    gguf_free(g);
    return path;
}

// Size queries of layers [first, last) with these widths (values 0: none), 512 cells. room: bytes of a device that has
// memory of its own, 0: there is no such device
static kvq_cache_draft asked(const char * method, const char * opts, const keys & metadata, int first, int last,
    int width_k, int width_v, bool for_draft = false, size_t room = 0) {
    const std::string path = model(metadata);
    CHECK(kvq_configure(method, opts, nullptr, path.c_str()) == KVQ_OK, "%s", kvq_last_error());
    setenv("KVQ_MODEL_DRAFT", path.c_str(), 1);
    kvq_cache_draft d;
    d.for_draft = for_draft;
    d.beside_host = room > 0;
    d.free_there = [=] { return room; };
    for (int il = first; il < last; il++) {
        d.add(("cache_k_l" + std::to_string(il)).c_str(), width_k, 512, 1, {});
        if (width_v) { d.add(("cache_v_l" + std::to_string(il)).c_str(), width_v, 512, 1, {}); }
    }
    kvq_configure(nullptr, nullptr, nullptr, nullptr);
    unsetenv("KVQ_MODEL_DRAFT");
    unlink(path.c_str());
    return d;
}

static bool refused(kvq_cache_draft & d, const char * why) {
    return !d.complete() && d.error().find(why) != std::string::npos;
}

static const keys LATENT = { { "attention.key_length", 192 }, { "attention.value_length", 128 },
    { "attention.key_length_mla", 96 }, { "attention.value_length_mla", 64 }, { "attention.kv_lora_rank", 128 } };

static void ordinary(void) {
    kvq_cache_draft d = asked("kivi", "", {}, 0, 6, 128, 128);
    CHECK(d.declined().empty() && d.complete() && d.layers.size() == 6 && !d.layers[0].latent, "%s", d.error().c_str());
    kvq_cache_draft wide = asked("kivi", "", {}, 0, 6, 128, 0);
    CHECK(wide.declined().empty() && refused(wide, "layer 0 keeps keys without values"), "%s", wide.error().c_str());
    kvq_cache_draft typed;
    typed.add("cache_k_l0", 128, 512, 1, { "bf16", 1, 2 });
    CHECK(refused(typed, "bf16 (-ctk)"), "%s", typed.error().c_str());
}

static void latent(void) {
    for (const char * method : { "f16", "kivi", "higgs" }) {
        kvq_cache_draft d = asked(method, "", LATENT, 0, 6, 192, 0);
        CHECK(d.declined().empty() && d.complete(), "%s: %s", method, d.error().c_str());
        const kvq_draft_layer & l = d.layers[5];
        CHECK(
            l.latent == 128 && l.k.codec.head_size == 128 && l.v.codec.head_size == 64 && l.v.codec.role == KVQ_ROLE_K,
            "%s", method);
        CHECK(d.asked.empty() && d.bytes_nominal == 6 * 2 * 192 * 512, "%zu", d.bytes_nominal);
    }
    for (const char * method : { "xquant", "zipcache", "minikv", "aqua", "lab" }) {
        kvq_cache_draft d = asked(method, !strcmp(method, "aqua") ? "predictor=none" : "", LATENT, 0, 6, 192, 0);
        CHECK(refused(d, "multi-head latent attention") && d.error().find(method) != std::string::npos, "%s: %s",
            method, d.error().c_str());
    }
    keys whole = LATENT; // no rotary part: keys are values altogether, kept as two halves
    whole[0].second = 128;
    kvq_cache_draft d = asked("higgs", "", whole, 0, 2, 128, 0);
    CHECK(d.complete() && d.layers[0].latent == 128 && d.layers[0].k.codec.head_size == 64 &&
            d.layers[0].plan.flags & KVQ_ATTN_LATENT_ALL,
        "%s", d.error().c_str());
}

// Method auto: keys and values of a layer stand on one rung, whatever ggml asks first; the bytes asked for are within
// the bits that count at so many tokens; without `at` a short cache has the level of a long one, and so has one whose
// layers see a window only; too few bits are refused in both.
static void levels(void) {
    for (const int width_v : { 64, 128, 256 }) {
        const uint32_t size_v = (uint32_t) width_v / 2;
        const keys heads = { { "attention.key_length", 64 }, { "attention.value_length", size_v } };
        kvq_cache_draft d = asked("auto", "bits=6,at=512", heads, 0, 6, 128, width_v);
        CHECK(d.declined().empty() && d.complete(), "%s", d.error().c_str());
        size_t nb = 0;
        for (const kvq_draft_layer & l : d.layers) {
            CHECK(l.level == d.layers[0].level && l.shape.head_size_v == (int) size_v, "%d %d", l.il, l.level);
            CHECK(l.k.codec.bits == l.plan.k.bits && l.v.codec.bits == l.plan.v.bits, "layer %d", l.il);
            nb += l.k.bytes() + l.v.bytes();
        }
        const double bits = 8.0 * (double) nb / (512.0 * 6 * (128 + width_v));
        CHECK(bits <= 6.0 && bits > 5.6, "%.3f bits with values of %d channels", bits, width_v);
    }
    const keys windowed = { { "attention.sliding_window", 256 } };
    for (const keys & more : { keys(), windowed }) {
        kvq_cache_draft all = asked("auto", "bits=4.25", more, 0, 6, 128, 128),
                        at = asked("auto", "bits=4.25,at=131072", more, 0, 6, 128, 128);
        CHECK(all.complete() && at.complete() && all.layers[5].level > 20, "%s", all.error().c_str());
        CHECK(all.layers[5].level == at.layers[5].level, "%d %d", all.layers[5].level, at.layers[5].level);
        kvq_cache_draft few = asked("auto", "bits=1", more, 0, 6, 128, 128),
                        small = asked("auto", "bits=2,at=512", more, 0, 6, 128, 128);
        CHECK(refused(few, "1.00 bits are not possible: 1.19 are the least in a context of 131072 tokens"), "%s",
            few.error().c_str());
        CHECK(refused(small, "2.00 bits are not possible"), "%s", small.error().c_str());
    }
}

static void indexers(void) {
    keys sparse = LATENT;
    sparse.push_back({ "attention.indexer.key_length", 128 });
    for (const char * method : { "kivi", "aqua" }) {
        kvq_cache_draft lid = asked(method, !strcmp(method, "aqua") ? "predictor=none" : "", sparse, 0, 6, 128, 0);
        CHECK(lid.declined() == "6 indexer layers", "'%s' %s", lid.declined().c_str(), lid.error().c_str());
    }
    kvq_cache_draft main = asked("kivi", "", sparse, 0, 6, 192, 0);
    CHECK(main.declined().empty() && main.complete(), "%s", main.error().c_str());
    // keys and values, one head
    kvq_cache_draft both = asked("kivi", "", { { "attention.indexer.key_length", 64 } }, 2, 3, 64, 128);
    CHECK(both.declined() == "1 indexer layer", "'%s'", both.declined().c_str());
    CHECK(
        !kvq_parse_cache_name("cache_idx_k_l3").tag.empty() && kvq_parse_cache_name("cache_k_l3").tag.empty(), "tags");
}

static void drafts(void) {
    const keys predicts = { { "nextn_predict_layers", 1 } };
    kvq_cache_draft main = asked("xquant", "", predicts, 0, 5, 128, 128);
    CHECK(main.declined().empty() && main.complete() && main.model.n_attention() == 5, "%d", main.model.n_attention());
    kvq_cache_draft mtp = asked("xquant", "", predicts, 5, 6, 128, 128);
    CHECK(mtp.declined() == "1 layer for multi-token prediction", "'%s'", mtp.declined().c_str());
    setenv("KVQ_METHOD_DRAFT", "higgs", 1);
    setenv("KVQ_OPTS_DRAFT", "bits=4", 1);
    kvq_cache_draft own = asked("xquant", "", predicts, 5, 6, 128, 128),
                    other = asked("xquant", "", {}, 0, 6, 128, 128, true);
    for (kvq_cache_draft * d : { &own, &other }) {
        CHECK(d->declined().empty() && d->complete() && !strcmp(d->config.method->info.name, "higgs") &&
                d->layers[0].k.codec.bits == 4,
            "%s", d->error().c_str());
    }
    setenv("KVQ_METHOD_DRAFT", "higgz", 1);
    kvq_cache_draft wrong = asked("xquant", "", {}, 0, 6, 128, 128, true);
    CHECK(refused(wrong, "higgz"), "%s", wrong.error().c_str());
    unsetenv("KVQ_METHOD_DRAFT");
    unsetenv("KVQ_OPTS_DRAFT");
}

// Which layers' blocks lie in the host's memory, and what is then asked for on the device.
static void places(void) {
    const auto on_host = [](const kvq_cache_draft & d) {
        std::string out;
        for (const kvq_draft_layer & l : d.layers) {
            CHECK(l.k.on_host == l.v.on_host, "layer %d lies in two places", l.il);
            out += l.k.on_host ? 'h' : 'd';
        }
        return out;
    };
    constexpr size_t MUCH = (size_t) 1 << 40;
    const kvq_cache_draft there = asked("kivi", "window=32", {}, 0, 6, 128, 128, false, MUCH),
                          host = asked("kivi", "window=32,place=host", {}, 0, 6, 128, 128, false, MUCH);
    const kvq_lane_layout &k = host.layers[0].k, &v = host.layers[0].v;
    const size_t nb = k.bytes() + v.bytes(),
                 nb_blocks = k.bytes_codes + k.bytes_params + v.bytes_codes + v.bytes_params;
    CHECK(on_host(there) == "dddddd" && on_host(host) == "hhhhhh", "%s", on_host(host).c_str());
    CHECK(nb_blocks && k.bytes_on_host() + v.bytes_on_host() == nb_blocks, "%zu", nb_blocks);
    CHECK(on_host(asked("kivi", "window=32,place=host", {}, 0, 6, 128, 128)) == "dddddd", "the device is the host");
    for (const char * method : { "kivi", "xquant", "higgs", "zipcache", "minikv", "auto", "aqua" }) {
        const char * host_opts = !strcmp(method, "aqua") ? "predictor=none,place=host" : "place=host";
        const kvq_cache_draft all = asked(method, host_opts, {}, 0, 6, 128, 128, false, MUCH);
        CHECK(on_host(all) == "hhhhhh", "%s: %s", method, on_host(all).c_str());
    }
    const char * opts = "window=32,place=auto";
    CHECK(on_host(asked("kivi", opts, {}, 0, 6, 128, 128, false, MUCH)) == "dddddd", "there is room");
    // three layers, windows and tables of the three behind them, f16 rows of one, and half of another layer's blocks
    const size_t rows = 2 * 512 * (128 + 128), room = 3 * nb + 3 * (nb - nb_blocks) + rows + nb_blocks / 2;
    const kvq_cache_draft some = asked("kivi", opts, {}, 0, 6, 128, 128, false, room);
    CHECK(on_host(some) == "dddhhh", "%s of 6 layers in room for 3.5", on_host(some).c_str());
    CHECK(on_host(asked("kivi", opts, {}, 0, 6, 128, 128, false, 1)) == "hhhhhh", "no room");
    kvq_cache_draft far = asked("specache", "place=host", {}, 0, 6, 128, 128, false, MUCH);
    CHECK(far.complete() && on_host(far) == "dddddd", "place is that of far rows: %s", far.error().c_str());
}

int main() {
    ordinary();
    places();
    latent();
    levels();
    indexers();
    drafts();
    printf("caches: ok\n");
    return 0;
}
