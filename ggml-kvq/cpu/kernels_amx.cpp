// Predictions on CPUs with matrix tiles of 8-bit integers (AMX, Intel from Sapphire Rapids on). All else is AVX-512's.
// A group of 16 chunks of a predictor (types/predictor.h) lies in memory as TDPBSUD wants its second operand: 64 inputs
// by 16 outputs. Sums are whole numbers, so the bits are those of the other kernels. Nothing here may run when the
// library is loaded: not every CPU has these instructions.
#if defined(KVQ_HAVE_AMX) // the compiler knows it (cmake/kvq_library.cmake)
#define KVQ_NS kvq_isa_amx
#include "isa_avx512.h"

#include <sys/syscall.h>
#include <unistd.h>

using namespace KVQ_NS;

namespace {

constexpr int ROWS = 16, OUTPUTS = 16, BYTES = 64; // of a tile
constexpr int N_TILES = 8;

struct tile_config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
    constexpr tile_config() {
        for (int i = 0; i < N_TILES; i++) { bytes[i] = BYTES, rows[i] = ROWS; }
    }
};
// Constant: GCC 12 drops stores before LDTILECFG, of whose operand it knows 8 bytes.
alignas(64) constexpr tile_config CONFIG;

// Our tiles while it lives. ggml's own kernels set their tiles once a thread, so these come back.
class tiles {
public:
    tiles() {
        _tile_storeconfig(before);
        __asm__ volatile("" ::: "memory");
        _tile_loadconfig(&CONFIG);
    }
    ~tiles() {
        if (before[0]) {
            _tile_loadconfig(before);
        } else {
            _tile_release();
        }
    }
    tiles(const tiles &) = delete;
    tiles & operator=(const tiles &) = delete;

private:
    alignas(64) uint8_t before[64]; // palette 0: no tiles were set
};
static_assert(sizeof(tile_config) == 64, "what LDTILECFG reads");

// The kernel gives a process tiles when it asks for them: their contents make the frames of signals larger.
bool may_use_tiles() {
    constexpr int REQUEST = 0x1023, TILE_DATA = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool may = !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
    return may;
}

// y = (step * f32(sum - base)) * s of 16 rows, as predict_tile8 (impl_predict.h)
void finish(const int32_t * sum, const float * step, const int32_t * base, const float * s, bool add, float * out,
    size_t stride) {
    const f32x16 steps = f32_load(step);
    for (int r = 0; r < ROWS; r++) {
        const i32x16 d = i32_sub(_mm512_load_si512(sum + r * OUTPUTS), i32_set1(base[r]));
        const f32x16 y = f32_mul(f32_mul(steps, f32_from_i32(d)), f32_set1(s[r]));
        float * to = out + (size_t) r * stride;
        f32_store(to, add ? f32_add(f32_load(to), y) : y);
    }
}

// 32 rows, 8-bit weights, an even number of groups
void predict32(const kvq_predictor & p, const int8_t * x, size_t x_stride, const float * s, bool add, float * out,
    size_t out_stride, const int32_t * base) {
    alignas(64) int32_t sums[4][ROWS * OUTPUTS];
    const int n = p.n_groups() / 2, stride = (int) x_stride; // steps of 64 inputs
    for (int tile = 0; tile < p.n_tiles(); tile += 2) {
        const bool two = tile + 1 < p.n_tiles();
        const uint8_t *codes0 = p.codes() + (size_t) tile * n * 1024, *codes1 = codes0 + (two ? (size_t) n * 1024 : 0);
        // tiles 0 to 3: sums of 16 rows and 16 outputs; 4, 5: rows; 6, 7: codes. GCC wants their numbers as digits.
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int i = 0; i < n; i++) {
            _tile_loadd(4, x + 64 * i, stride);
            _tile_loadd(5, x + 64 * i + ROWS * x_stride, stride);
            _tile_loadd(6, codes0 + 1024 * i, BYTES);
            _tile_loadd(7, codes1 + 1024 * i, BYTES);
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 4, 7);
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        }
        _tile_stored(0, sums[0], BYTES);
        _tile_stored(1, sums[1], BYTES);
        _tile_stored(2, sums[2], BYTES);
        _tile_stored(3, sums[3], BYTES);
        for (int i = 0; i < 4; i++) {
            const int t = tile + i % 2, r = i / 2 * ROWS;
            if (t >= p.n_tiles()) { continue; }
            finish(sums[i], p.steps8() + OUTPUTS * t, base + r, s + r, add, out + r * out_stride + OUTPUTS * t,
                out_stride);
        }
    }
}

} // namespace

void kvq_amx_predict(const kvq_predictor & p, int n_rows, const int8_t * x, size_t x_stride, const float * s, bool add,
    float * out, size_t out_stride, int32_t * base) {
    int r = 0;
    if (p.bits == 8 && p.n_groups() % 2 == 0 && n_rows >= 2 * ROWS && may_use_tiles()) {
        const tiles ours;
        for (; r + 2 * ROWS <= n_rows; r += 2 * ROWS) {
            for (int i = 0; i < 2 * ROWS; i++) {
                const int8_t * row = x + (size_t) (r + i) * x_stride;
                __m512i sum = _mm512_setzero_si512();
                for (int j = 0; j < p.n_groups(); j += 2) {
                    sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), _mm512_loadu_si512(row + 32 * j));
                }
                base[i] = p.offset() * _mm512_reduce_add_epi32(sum);
            }
            predict32(
                p, x + (size_t) r * x_stride, x_stride, s + r, add, out + (size_t) r * out_stride, out_stride, base);
        }
    }
    if (r < n_rows) {
        kvq_kernels_avx512.predict(p, n_rows - r, x + (size_t) r * x_stride, x_stride, s + r, add,
            out + (size_t) r * out_stride, out_stride, base);
    }
}

bool kvq_amx_available() {
    unsigned eax = 7, ebx = 0, ecx = 0, edx = 0;
    if (!kvq_kernels_avx512.available()) { return false; }
    __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
    return edx >> 24 & edx >> 25 & 1; // tiles, and their 8-bit integers
}
#endif
