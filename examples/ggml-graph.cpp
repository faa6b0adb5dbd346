// A ggml program that keeps keys and values in 2-bit blocks without llama.cpp, on the three ops of ggml-kvq-graph.h:
//
//   layer 0   k0, v0 -> encode                                   blocks of their own
//   layer 1   predict k1 from k0, encode what is left            ggml_kvq_predict, ggml_kvq_encode (AQUA-KV's idea)
//   attention over layer 0's blocks                              ggml_kvq_attn
//
// It prints how far attention over the blocks is from attention in f32, and what the prediction saves.
//
//   cmake -B build -DLLAMA_CPP_DIR=<llama.cpp source> -DKVQ_BUILD_TESTS=ON && cmake --build build --target ggml-graph
//   build/examples/ggml-graph [FOLDER]
//
// FOLDER: where llama.cpp's backends are modules (GGML_BACKEND_DL), theirs.
#include "ggml-kvq-graph.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

constexpr int HEAD = 64, HEADS = 2, CELLS = 256, QUERIES = 4, WIDTH = HEAD * HEADS;

static void fill(ggml_tensor * t, const std::vector<float> & x) { memcpy(t->data, x.data(), ggml_nbytes(t)); }

// relative error of attention `got` [HEAD, HEADS, QUERIES] against softmax(q.k / sqrt(HEAD)) v in f64
static double attention_error(
    const std::vector<float> & q, const std::vector<float> & k, const std::vector<float> & v, const float * got) {
    double off = 0, size = 0;
    for (int i = 0; i < QUERIES; i++) {
        for (int h = 0; h < HEADS; h++) {
            std::vector<double> out(HEAD, 0.0);
            double sum = 0;
            for (int c = 0; c < CELLS; c++) {
                double dot = 0;
                for (int d = 0; d < HEAD; d++) {
                    dot += (double) q[(h * QUERIES + i) * HEAD + d] * k[c * WIDTH + h * HEAD + d];
                }
                const double p = exp(dot / sqrt(HEAD));
                sum += p;
                for (int d = 0; d < HEAD; d++) { out[d] += p * v[c * WIDTH + h * HEAD + d]; }
            }
            for (int d = 0; d < HEAD; d++) {
                const double want = out[d] / sum, have = got[(i * HEADS + h) * HEAD + d];
                off += (have - want) * (have - want);
                size += want * want;
            }
        }
    }
    return sqrt(off / size);
}

// root mean square of x over that of what blocks give back
static double round_trip_error(kvq_codec codec, std::vector<float> x) {
    const std::vector<float> before = x;
    if (kvq_round_trip(&codec, HEADS, CELLS, x.data(), 1) != KVQ_OK) { fprintf(stderr, "%s\n", kvq_last_error()); }
    double off = 0;
    for (size_t i = 0; i < x.size(); i++) { off += ((double) x[i] - before[i]) * ((double) x[i] - before[i]); }
    return sqrt(off / (double) x.size());
}

int main(int argc, char ** argv) {
    std::mt19937 rng(1);
    std::normal_distribution<float> normal;
    std::vector<float> w((size_t) WIDTH * WIDTH), k0((size_t) WIDTH * CELLS), v0(k0.size()), k1(k0.size()),
        q((size_t) HEAD * HEADS * QUERIES);
    for (auto * x : { &w, &k0, &v0, &q }) {
        for (float & f : *x) { f = normal(rng); }
    }
    for (float & f : w) { f /= sqrtf((float) WIDTH); }
    for (int c = 0; c < CELLS; c++) { // layer 1 follows layer 0, but for a tenth of its variance
        for (int i = 0; i < WIDTH; i++) {
            float sum = 0.33f * normal(rng);
            for (int j = 0; j < WIDTH; j++) { sum += w[(size_t) i * WIDTH + j] * k0[(size_t) c * WIDTH + j]; }
            k1[(size_t) c * WIDTH + i] = sum;
        }
    }

    kvq_codec codec = {};
    codec.type = KVQ_TYPE_LATTICE;
    codec.role = KVQ_ROLE_K;
    codec.bits = 2;
    codec.group = 2; // channels per index
    codec.scale = 1; // 8-bit scales
    codec.n_cells = 32;
    codec.head_size = HEAD;
    ggml_kvq_attn_params p = {};
    p.k = p.v = codec;
    p.v.role = KVQ_ROLE_V;
    p.n_head_kv = HEADS;
    p.scale = 1.0f / sqrtf((float) HEAD);

    ggml_init_params ip = { 64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, /*no_alloc =*/true };
    ggml_context * ctx = ggml_init(ip);
    ggml_tensor *keys0 = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, HEAD, HEADS, CELLS),
                *values0 = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, HEAD, HEADS, CELLS);
    ggml_tensor *keys1 = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, HEAD, HEADS, CELLS),
                *query = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, HEAD, QUERIES, HEADS);
    ggml_tensor * matrix = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, (int64_t) kvq_weights_bytes(WIDTH, WIDTH, 8));

    ggml_tensor *k_blocks = ggml_kvq_encode(ctx, &p.k, keys0, nullptr),
                *v_blocks = ggml_kvq_encode(ctx, &p.v, values0, nullptr);
    ggml_tensor * out = ggml_kvq_attn(ctx, &p, query, k_blocks, v_blocks, nullptr, nullptr, nullptr, nullptr);
    ggml_tensor * pred = ggml_kvq_predict(ctx, matrix, WIDTH, 8, ggml_reshape_2d(ctx, keys0, WIDTH, CELLS), nullptr);
    ggml_tensor * left = ggml_sub(ctx, ggml_reshape_2d(ctx, keys1, WIDTH, CELLS), pred);
    ggml_tensor * rest = ggml_kvq_encode(ctx, &p.k, ggml_reshape_3d(ctx, left, HEAD, HEADS, CELLS), nullptr);
    if (!out || !pred || !rest) {
        fprintf(stderr, "%s\n", kvq_last_error());
        return 1;
    }
    ggml_cgraph * graph = ggml_new_graph(ctx);
    for (ggml_tensor * t : { out, left, rest }) { ggml_build_forward_expand(graph, t); }

    if (!ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)) {
        ggml_backend_load_all_from_path(argc > 1 ? argv[1] : nullptr);
    }
    ggml_backend_t backend = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    if (!backend) {
        fprintf(stderr, "no CPU backend; give the folder of libggml-cpu-*.so\n");
        return 1;
    }
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    fill(keys0, k0);
    fill(values0, v0);
    fill(keys1, k1);
    fill(query, q);
    kvq_weights_pack(WIDTH, WIDTH, 8, w.data(), matrix->data);
    if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) { return 1; }
    const std::vector<float> residual((const float *) left->data, (const float *) left->data + ggml_nelements(left));
    const double plain = round_trip_error(p.k, k1), predicted = round_trip_error(p.k, residual);
    printf("%d cells of %d x %d: keys in %zu bytes instead of %zu at f16\n", CELLS, HEADS, HEAD, ggml_nbytes(k_blocks),
        2 * k0.size());
    printf("attention over 2-bit blocks: relative error %.3f\n", attention_error(q, k0, v0, (const float *) out->data));
    printf("layer 1 in 2 bits: error %.3f, behind the prediction from layer 0: %.3f\n", plain, predicted);
    ggml_backend_buffer_free(buffer);
    ggml_backend_free(backend);
    ggml_free(ctx);
    return predicted < 0.5 * plain ? 0 : 1;
}
