// What the CPU kernels cost, in counts of the time stamp counter (least of many runs, so other load hardly shows).
//   bench_kernels [--quick] [--threads N] [--gqa N] [--head N] [FORMAT...]      KVQ_ISA chooses the instruction set
// For every format and one page of one KV head: keys (score), values (accumulate), the page within a whole attention
// call, and encoding one block of keys and of values. Then a cache larger than the processor's: bytes read per second
// beside a STREAM-like sum of the same machine. Attention calls are the product's own (kvq_cpu_attend). Results are
// held against the portable kernels and the types' own encoders on the way, the means of keys (aqua) against f64; a
// difference ends the program with 1.
#include "engine/host.h"
#include "cpu/kernels.h"
#include "cpu/lattice.h"
#include "engine/rope.h"
#include "base/f16.h"
#include "types/types.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace {

struct settings {
    bool quick = false;
    int threads = 2, gqa = 4, head = 128;
    std::vector<std::string> only;
};

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

uint64_t counts() {
#if defined(__x86_64__)
    return __rdtsc();
#elif defined(__aarch64__)
    uint64_t t;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(t));
    return t;
#else
    return (uint64_t) (1e9 * seconds());
#endif
}

template <typename F> double least(const settings & o, F f) {
    uint64_t best = ~0ull;
    for (int i = 0; i < (o.quick ? 3 : 300); i++) {
        const uint64_t t = counts();
        f();
        best = std::min(best, counts() - t);
    }
    return (double) best;
}

uint32_t seed = 1;
float random_float() { // sum of uniforms: variance 1
    float x = 0.0f;
    for (int i = 0; i < 3; i++) {
        seed = seed * 1664525u + 1013904223u;
        x += (float) (seed >> 8) * (1.0f / (1 << 23)) - 1.0f;
    }
    return x;
}

struct bytes { // 64-byte aligned
    explicit bytes(size_t n) : p((uint8_t *) aligned_alloc(64, (n + 127) / 64 * 64)) { memset(p, 0, n); }
    ~bytes() { free(p); }
    bytes(const bytes &) = delete;
    bytes & operator=(const bytes &) = delete;
    uint8_t * const p;
};

// A cache of n_pages pages and n_heads KV heads; blocks differ for up to 16 pages, then repeat.
struct cache {
    kvq_codec k, v;
    kvq_view vk, vv;
    bytes mem_k, mem_v;
    std::vector<kvq_page> pages;

    static size_t stride(const kvq_view & v, int n_heads) {
        return (n_heads * (v.nb_codes + v.nb_params) + 63) / 64 * 64;
    }

    cache(const kvq_codec & k, const kvq_codec & v, int n_pages, int n_heads) :
        k(k),
        v(v),
        vk(kvq_make_view(k)),
        vv(kvq_make_view(v)),
        mem_k(n_pages * stride(vk, n_heads)),
        mem_v(n_pages * stride(vv, n_heads)) {
        pages.resize((size_t) n_pages);
        for (int p = 0; p < n_pages; p++) {
            kvq_page & to = pages[(size_t) p];
            to = {};
            to.cell = p * k.n_cells;
            to.n_slots = k.n_cells;
            to.k_codes = fill(mem_k.p + p * stride(vk, n_heads), vk, n_heads, p, to.k_params);
            to.v_codes = fill(mem_v.p + p * stride(vv, n_heads), vv, n_heads, p, to.v_params);
        }
    }

    static const void * fill(uint8_t * at, const kvq_view & v, int n_heads, int page, const void *& params) {
        const size_t nb = stride(v, n_heads);
        params = v.codec.type == KVQ_TYPE_F16 ? nullptr : at + n_heads * v.nb_codes;
        if (page >= 16) {
            memcpy(at, at - 16 * nb, nb);
            return at;
        }
        std::vector<uint16_t> rows((size_t) v.codec.n_cells * v.dp);
        for (int h = 0; h < n_heads; h++) {
            for (uint16_t & x : rows) { x = kvq_f32_to_f16(random_float()); }
            if (!params) {
                memcpy(at + h * v.nb_codes, rows.data(), v.nb_codes);
            } else {
                kvq_cpu_encode(v.codec, rows.data(), nullptr, nullptr, at + h * v.nb_codes,
                    at + n_heads * v.nb_codes + h * v.nb_params);
            }
        }
        return at;
    }

    size_t nb_read(int n_heads) const {
        return pages.size() * n_heads * (vk.nb_codes + vk.nb_params + vv.nb_codes + vv.nb_params);
    }
};

void attend(const cache & c, int n_heads, int gqa, int n_q, int threads, const float * q, float * out) {
    kvq_attn a = {};
    a.k = c.k;
    a.v = c.v;
    a.n_q = n_q;
    a.n_head = n_heads * gqa;
    a.n_head_kv = n_heads;
    a.n_pages = (int) c.pages.size();
    a.n_kv = a.n_pages * c.k.n_cells;
    a.scale = 1.0f / sqrtf((float) c.k.head_size);
    a.q = q;
    a.dst = out;
    a.q_stride_head = c.k.head_size;
    a.dst_stride_head = c.v.head_size;
    a.q_stride_token = (int64_t) a.n_head * a.q_stride_head;
    a.dst_stride_token = (int64_t) a.n_head * a.dst_stride_head;
    a.pages = c.pages.data();
    kvq_cpu_attend(&a, 1, threads);
}

// Bytes per second that `threads` threads read, best of 10.
double read_bandwidth(const settings & o) {
    const size_t n = ((size_t) (o.quick ? 16 : 256) << 20) / 8 / (size_t) o.threads;
    std::vector<std::vector<uint64_t>> parts((size_t) o.threads, std::vector<uint64_t>(n, 1));
    std::vector<uint64_t> sums((size_t) o.threads * 8);
    double best = 0.0;
    for (int i = 0; i < 10; i++) {
        const double t = seconds();
        std::vector<std::thread> pool;
        for (int j = 0; j < o.threads; j++) {
            pool.emplace_back([&, j] {
                uint64_t s[8] = {};
                for (size_t k = 0; k + 8 <= n; k += 8) {
                    for (int l = 0; l < 8; l++) { s[l] += parts[(size_t) j][k + l]; }
                }
                for (int l = 0; l < 8; l++) { sums[(size_t) j * 8] += s[l]; }
            });
        }
        for (auto & x : pool) { x.join(); }
        best = std::max(best, 8.0 * (double) n * o.threads / (seconds() - t));
    }
    return sums[0] ? best : 0.0;
}

struct format {
    const char * name;
    int type, bits, group, scale;
    int split = 0, fast_bits = 0; // of keys
};
const format formats[] = {
    { "f16", KVQ_TYPE_F16, 16, 1, 0 },
    { "affine1", KVQ_TYPE_AFFINE, 1, 32, 0 },
    { "affine2", KVQ_TYPE_AFFINE, 2, 32, 0 },
    { "affine3", KVQ_TYPE_AFFINE, 3, 32, 0 },
    { "affine4", KVQ_TYPE_AFFINE, 4, 32, 0 },
    { "affine2-g128", KVQ_TYPE_AFFINE, 2, 128, 0 },
    { "affine2-u8", KVQ_TYPE_AFFINE, 2, 32, 1 },
    { "lattice1-d8", KVQ_TYPE_LATTICE, 1, 8, 1 },
    { "lattice2", KVQ_TYPE_LATTICE, 2, 2, 1 },
    { "lattice2-d4", KVQ_TYPE_LATTICE, 2, 4, 1 },
    { "lattice3", KVQ_TYPE_LATTICE, 3, 2, 1 },
    { "lattice4", KVQ_TYPE_LATTICE, 4, 2, 1 },
    { "lattice0|2", KVQ_TYPE_LATTICE, 2, 2, 1, KVQ_SPLIT_NORM, 0 }, // values 2
    { "lattice0|4", KVQ_TYPE_LATTICE, 4, 2, 1, KVQ_SPLIT_NEOX, 0 }, // values 4
    { "lattice2|4", KVQ_TYPE_LATTICE, 4, 2, 1, KVQ_SPLIT_NEOX, 2 },
};

kvq_codec codec(const settings & o, const format & f, int role) {
    kvq_codec c = {};
    c.type = f.type;
    c.role = role;
    c.bits = f.bits;
    c.scale = f.scale;
    c.group = f.type == KVQ_TYPE_AFFINE && role == KVQ_ROLE_V ? std::min(f.group, o.head) : f.group;
    c.n_cells = f.type == KVQ_TYPE_AFFINE ? std::max(32, f.group) : 32;
    c.head_size = o.head;
    c.split = role == KVQ_ROLE_K ? f.split : 0;
    c.fast_bits = role == KVQ_ROLE_K ? f.fast_bits : 0;
    return c;
}

// Largest difference over largest value.
float apart(const float * a, const float * b, size_t n) {
    float d = 0.0f, top = 1e-30f;
    for (size_t i = 0; i < n; i++) {
        d = std::max(d, std::isnan(a[i]) ? INFINITY : fabsf(a[i] - b[i]));
        top = std::max(top, fabsf(b[i]));
    }
    return d / top;
}

void must(bool ok, const format & f, const char * what) {
    if (!ok) {
        fprintf(stderr, "%s: %s of the %s kernels differ from the portable ones\n", f.name, what, kvq_kernel_name());
        exit(1);
    }
}

// Scores and values of one run, by any kernels.
struct kernel_calls {
    const kvq_kernels & K;
    const format & f;
    const cache & c;
    int rows;
    kvq_lattice_keys lk = {};
    kvq_lattice_view lv = {};
    kvq_lattice_queries folded[2];

    kernel_calls(const kvq_kernels & K, const format & f, const cache & c, int rows, const float * q) :
        K(K), f(f), c(c), rows(rows) {
        if (f.type == KVQ_TYPE_LATTICE) {
            lk = kvq_lattice_make_keys(c.k);
            lv = kvq_lattice_make_view(c.v);
            for (int i = 0; i < lk.n; i++) { folded[i].fold(lk.half[i], rows, c.vk.dp, q); }
        }
    }
    void score(const kvq_run & run, const float * q, float * logits, void * work) const {
        if (f.type == KVQ_TYPE_LATTICE) {
            for (int i = 0; i < lk.n; i++) {
                K.score_lattice(lk.half[i], rows, run, folded[i].rows.data(), i ? logits : nullptr, logits);
            }
        } else {
            K.block[f.type].score(c.vk, rows, run, q, logits, work);
        }
    }
    void accum(const kvq_run & run, const float * p, const float * by, float * out, void * work) const {
        if (f.type == KVQ_TYPE_LATTICE) {
            K.accum_lattice(lv, rows, run, p, by, out);
        } else {
            K.block[f.type].accum(c.vv, rows, run, p, by, out, work);
        }
    }
};

void bench(const settings & o, const format & f, double bandwidth) {
    const kvq_kernels & K = kvq_get_kernels();
    const kvq_codec k = codec(o, f, KVQ_ROLE_K), v = codec(o, f, KVQ_ROLE_V);
    constexpr int PAGES = 16;
    const double per_32 = (double) k.n_cells / 32 * PAGES; // counts are given by 32 cells
    const cache c(k, v, PAGES, 1);
    const size_t dp = (size_t) c.vk.dp, n = (size_t) k.n_cells, R = (size_t) o.gqa;
    bytes work(std::max(kvq_work_bytes(c.vk), kvq_work_bytes(c.vv))), logits(4 * KVQ_MAX_RUN * R * n), out(8 * R * dp);
    std::vector<float> q(R * dp);
    for (float & x : q) { x = random_float(); }
    float *const p = (float *) logits.p, *const o_rows = (float *) out.p;

    const kernel_calls here(K, f, c, (int) R, q.data()), plain(kvq_kernels_portable, f, c, (int) R, q.data());
    kvq_run runs[2][PAGES / KVQ_MAX_RUN];
    for (int i = 0; i < PAGES; i++) {
        const kvq_page & page = c.pages[(size_t) i];
        for (int j = 0; j < 2; j++) {
            kvq_run & r = runs[j][i / KVQ_MAX_RUN];
            r.n_pages = KVQ_MAX_RUN;
            r.codes[i % KVQ_MAX_RUN] = j ? page.v_codes : page.k_codes;
            r.params[i % KVQ_MAX_RUN] = j ? page.v_params : page.k_params;
        }
    }
    bytes logits2(4 * KVQ_MAX_RUN * R * n), out2(8 * R * dp);
    here.score(runs[0][0], q.data(), p, work.p);
    plain.score(runs[0][0], q.data(), (float *) logits2.p, work.p);
    must(apart(p, (float *) logits2.p, KVQ_MAX_RUN * R * n) < 1e-5f, f, "scores");
    const double score = least(o, [&] {
        for (const kvq_run & run : runs[0]) { here.score(run, q.data(), p, work.p); }
    });
    std::vector<float> slope(KVQ_MAX_ROWS, 1.0f), m(KVQ_MAX_ROWS, 0.0f), l(KVQ_MAX_ROWS), t(KVQ_MAX_ROWS),
        by(KVQ_MAX_RUN * KVQ_MAX_ROWS, 0.5f), sums(by.size());
    const std::vector<const uint16_t *> mask(by.size(), nullptr);
    const std::vector<float> logits0(p, p + KVQ_MAX_RUN * R * n);
    const double soft = least(o, [&] {
        for (int i = 0; i < PAGES; i += KVQ_MAX_RUN) {
            std::copy(logits0.begin(), logits0.end(), p);
            K.softmax((int) R, (int) n, KVQ_MAX_RUN, p, 0.1f, 0.0f, slope.data(), mask.data(), m.data(), l.data(),
                t.data(), by.data(), sums.data());
        }
    });
    memset(out.p, 0, 8 * R * dp);
    here.accum(runs[1][0], p, by.data(), o_rows, work.p);
    plain.accum(runs[1][0], p, by.data(), (float *) out2.p, work.p);
    // a weight near a tie may round to either side
    must(apart(o_rows, (float *) out2.p, 2 * R * dp) < 1e-3f, f, "values");
    const double accum = least(o, [&] {
        for (const kvq_run & run : runs[1]) { here.accum(run, p, by.data(), o_rows, work.p); }
    });
    const cache many(k, v, 8 * PAGES, 1);
    const double whole = (least(o, [&] { attend(many, 1, o.gqa, 1, 1, q.data(), o_rows); }) -
                             least(o, [&] { attend(c, 1, o.gqa, 1, 1, q.data(), o_rows); })) /
        7;
    double encode[2] = {};
    if (f.type != KVQ_TYPE_F16) {
        std::vector<uint16_t> rows(n * (size_t) o.head);
        for (uint16_t & x : rows) { x = kvq_f32_to_f16(random_float()); }
        bytes codes(std::max(c.vk.nb_codes, c.vv.nb_codes)), params(std::max(c.vk.nb_params, c.vv.nb_params));
        for (int i = 0; i < 2; i++) {
            const kvq_codec & codec = i ? v : k;
            encode[i] = least(o, [&] { kvq_cpu_encode(codec, rows.data(), nullptr, nullptr, codes.p, params.p); }) /
                (double) n * 32;
            const kvq_view & view = i ? c.vv : c.vk;
            bytes codes2(view.nb_codes), params2(view.nb_params);
            kvq_traits(codec.type)->encode(codec, rows.data(), nullptr, nullptr, codes2.p, params2.p);
            must(!memcmp(codes.p, codes2.p, view.nb_codes) && !memcmp(params.p, params2.p, view.nb_params), f,
                "encoded bytes");
        }
    }
    // 8 KV heads, beyond the processor's cache
    const int heads = 8;
    const cache big(k, v, (o.quick ? 1024 : 65536) / k.n_cells, heads);
    std::vector<float> q8((size_t) heads * R * o.head, 0.25f), out8(q8.size());
    double best = 1e30;
    for (int i = 0; i < (o.quick ? 2 : 8); i++) {
        const double t = seconds();
        attend(big, heads, o.gqa, 1, o.threads, q8.data(), out8.data());
        best = std::min(best, seconds() - t);
    }
    const double rate = (double) big.nb_read(heads) / best;
    printf("%-13s %8.0f %8.0f %8.0f %8.0f %10.0f %10.0f %9.2f %8.1f%% %9.1f\n", f.name, score / per_32, soft / per_32,
        accum / per_32, whole / per_32, encode[0], encode[1], rate / 1e9, 100.0 * rate / bandwidth,
        (double) big.pages.size() * k.n_cells * heads * o.head * 4 / best / 1e9);
    fflush(stdout);
}

// What the mean of keys adds to logits (aqua): against f64 at every position of 1 to 4 pages, then counts for 32 cells.
void bench_means(const settings & o) {
    const kvq_kernels & K = kvq_get_kernels();
    kvq_rope rope;
    rope.n_dims = o.head;
    kvq_rotor rotor(rope);
    rotor.cover(16384);
    const kvq_turns & t = *(const kvq_turns *) rotor.view().turns;
    const size_t R = (size_t) o.gqa, head = (size_t) o.head, n_pad = (size_t) t.n_pad;
    std::vector<float> q(R * head), mean(head), coef(R * 2 * n_pad), step(2 * R), logits(KVQ_MAX_RUN * R * 32);
    for (float & x : q) { x = random_float(); }
    for (float & x : mean) { x = random_float(); }
    std::vector<double> size(R); // of a row's logits over positions
    for (size_t r = 0; r < R; r++) {
        kvq_turn_coefficients(rotor.view(), &q[r * head], mean.data(), &coef[r * 2 * n_pad], &step[2 * r]);
        for (size_t i = 0; i < head; i += 2) {
            size[r] +=
                0.5 * (pow(q[r * head + i], 2) + pow(q[r * head + i + 1], 2)) * (pow(mean[i], 2) + pow(mean[i + 1], 2));
        }
    }
    double worst = 0.0;
    for (const int first : { 0, 1, 63, 1000, 8001, 16001 }) {
        for (int pages = 1; pages <= KVQ_MAX_RUN; pages++) {
            K.score_mean(t.view(), first, pages, 32, o.gqa, coef.data(), step.data(), logits.data());
            for (int x = 0; x < pages * o.gqa * 32; x++) {
                const size_t r = (size_t) (x / 32 % o.gqa);
                const int pos = first + x / 32 / o.gqa * 32 + x % 32;
                double want = 0.0;
                for (size_t i = 0; i < head; i += 2) {
                    const double angle = pos * pow(10000.0, -(double) i / (double) head), a = q[r * head + i],
                                 b = q[r * head + i + 1];
                    want += (a * mean[i] + b * mean[i + 1]) * cos(angle) + (b * mean[i] - a * mean[i + 1]) * sin(angle);
                }
                worst = std::max(
                    worst, std::isnan(logits[(size_t) x]) ? INFINITY : fabs(logits[(size_t) x] - want) / sqrt(size[r]));
            }
        }
    }
    if (worst > 4e-3) {
        fprintf(
            stderr, "means of keys: %s kernels are %.2e of a logit's size apart from f64\n", kvq_kernel_name(), worst);
        exit(1);
    }
    const double counts = least(
        o, [&] { K.score_mean(t.view(), 1000, KVQ_MAX_RUN, 32, o.gqa, coef.data(), step.data(), logits.data()); });
    printf("%-13s %8.0f of keys' means (aqua): %d terms for %d pairs, worst error %.1e of a logit's size\n", "means",
        counts / KVQ_MAX_RUN, t.n_terms, t.n_pairs, worst);
}

} // namespace

int main(int argc, char ** argv) {
    settings o;
    for (int i = 1; i < argc; i++) {
        const std::string a = argv[i];
        int * to = a == "--threads" ? &o.threads : a == "--gqa" ? &o.gqa : a == "--head" ? &o.head : nullptr;
        if (a == "--quick") {
            o.quick = true;
        } else if (to && i + 1 < argc && atoi(argv[i + 1]) > 0) {
            *to = atoi(argv[++i]);
        } else if (a[0] != '-') {
            o.only.push_back(a);
        } else {
            fprintf(stderr,
                "usage: bench_kernels [--quick] [--threads N] [--gqa N] [--head N] [FORMAT...]; cannot read '%s'\n",
                argv[i]);
            return 2;
        }
    }
    for (const std::string & name : o.only) {
        if (name != "means" &&
            std::none_of(std::begin(formats), std::end(formats), [&](const format & f) { return name == f.name; })) {
            fprintf(stderr, "no format '%s': it is means or one of", name.c_str());
            for (const format & f : formats) { fprintf(stderr, " %s", f.name); }
            fprintf(stderr, "\n");
            return 2;
        }
    }
    if (o.gqa > KVQ_MAX_ROWS || o.head % 16 || o.head > KVQ_MAX_HEAD) {
        fprintf(stderr, "--gqa is at most %d, --head a multiple of 16 up to %d\n", KVQ_MAX_ROWS, KVQ_MAX_HEAD);
        return 2;
    }
    const double bandwidth = read_bandwidth(o);
    const double t = seconds();
    const uint64_t c = counts();
    while (seconds() - t < 0.02) {}
    printf("kernels %s, head size %d, %d query heads a KV head; counts of %.2f GHz for 32 cells of one KV head; memory "
           "reads %.1f GB/s with %d threads\n",
        kvq_kernel_name(), o.head, o.gqa, (double) (counts() - c) / (seconds() - t) / 1e9, bandwidth / 1e9, o.threads);
    printf("%-13s %8s %8s %8s %8s %10s %10s %9s %9s %9s\n", "format", "keys", "softmax", "values", "page", "encode K",
        "encode V", "GB/s", "of memory", "as f16");
    for (const format & f : formats) {
        if (o.only.empty() || std::find(o.only.begin(), o.only.end(), f.name) != o.only.end()) {
            bench(o, f, bandwidth);
        }
    }
    if (o.only.empty() || std::find(o.only.begin(), o.only.end(), "means") != o.only.end()) { bench_means(o); }
    return 0;
}
