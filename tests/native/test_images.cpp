// Images of saved pages by the kernels against types/, which defines them: the same rows, the same yes or no, the same
// codes, on every instruction set of this machine. Usage: test_images [n] [seed], in the instruction set of KVQ_ISA
// when that is set.
#include "base/f16.h"
#include "base/row_hash.h"
#include "check.h"
#include "engine/host.h"
#include "engine/rope.h"
#include "types/lattice.h"
#include "types/types.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

using rows_t = std::vector<uint16_t>;
using bytes_t = std::vector<uint8_t>;

static int pick(std::initializer_list<int> x) { return x.begin()[uniform(0, (int) x.size() - 1)]; }
static bytes_t room_for(size_t nb) { // none of them is NULL, not even of no bytes
    bytes_t x;
    x.reserve(nb + 1);
    x.resize(nb);
    return x;
}
static uint8_t random_byte() { return (uint8_t) uniform(0, 255); }

static kvq_codec random_codec() {
    for (;;) {
        kvq_codec c = {};
        c.type = pick({ KVQ_TYPE_AFFINE, KVQ_TYPE_AFFINE, KVQ_TYPE_LATTICE, KVQ_TYPE_LATTICE, KVQ_TYPE_MIXED });
        c.role = pick({ KVQ_ROLE_K, KVQ_ROLE_V });
        c.head_size = pick({ 8, 16, 24, 32, 48, 64, 64, 64, 80, 96, 128, 128, 256 });
        c.n_cells = pick({ 32, 32, 64, 128, 256 });
        c.bits = uniform(0, 4);
        c.scale = uniform(0, 2);
        if (c.type == KVQ_TYPE_LATTICE) {
            c.group = pick({ 2, 2, 4, 8 });
            c.scale = uniform(0, 2);
            if (c.role == KVQ_ROLE_K && uniform(0, 2) == 0) {
                c.split = pick({ KVQ_SPLIT_NORM, KVQ_SPLIT_NEOX });
                c.fast_bits = uniform(0, 4);
            }
        } else {
            c.group = pick({ 16, 32, 64, c.head_size, c.n_cells });
            c.levels = uniform(0, 1);
            c.eta = uniform(0, 1) ? 0.05f : 0.0f;
        }
        if (c.type == KVQ_TYPE_MIXED) {
            c.hi = uniform(1, 4);
            c.n_hi = 32 * uniform(0, c.n_cells / 32);
        }
        if (!kvq_traits(c.type)->refuse(c)) { return c; }
    }
}

// Rows whose vectors lie half-way between two points of the grid, or beside it: several points are almost as near.
static rows_t rows_between_points(const kvq_codec & c) {
    const kvq_grid & g = *kvq_grid_find(c.group, c.bits);
    const size_t D = (size_t) c.head_size, d = (size_t) g.d;
    rows_t rows((size_t) c.n_cells * D);
    std::vector<float> x(D);
    for (size_t at = 0; at < rows.size(); at += D) {
        const float scale = (float) uniform(1, 400) / 100.0f * (float) g.step / 4096.0f;
        size_t a = 0, b = 0;
        for (size_t i = 0; i < D; i++) {
            const size_t j = i % d;
            a = j ? a : (size_t) uniform(0, g.n - 1);
            b = j ? b : (size_t) uniform(0, g.n - 1);
            x[i] = scale * (0.5f * (float) (g.point[a * d + j] + g.point[b * d + j]) + (float) uniform(-1, 1) / 16.0f);
        }
        kvq_hadamard((int) D, x.data());
        for (size_t i = 0; i < D; i++) { rows[at + i] = kvq_f32_to_f16(x[i]); }
    }
    return rows;
}

// Rows of many kinds: usual ones, heavy tails, one value throughout, zeros of either sign, large, tiny, any bits.
static rows_t random_rows(const kvq_codec & c) {
    rows_t rows((size_t) c.n_cells * (size_t) c.head_size);
    const int kind = uniform(0, 10);
    if (kind == 10 && c.type == KVQ_TYPE_LATTICE && !c.split) { return rows_between_points(c); }
    std::normal_distribution<float> normal(0.0f, kind == 0 ? 1e-6f : kind == 1 ? 3e4f : 1.0f);
    const uint16_t one = kvq_f32_to_f16(normal(rng));
    for (uint16_t & x : rows) {
        float y = normal(rng);
        y = kind == 2 ? y * y * y * y * y : y;
        x = kind == 3 ? one : kind == 4 ? (uint16_t) (uniform(0, 1) << 15) : kvq_f32_to_f16(y);
        if (kind == 5) { x = (uint16_t) uniform(0, 0xffff); }
        if (kind == 6) { x = uniform(0, 3) ? 0 : x; }
    }
    for (size_t t = 0; kind == 7 && t < (size_t) c.n_cells; t++) { // some cells hold nothing
        if (uniform(0, 1)) { std::fill_n(rows.begin() + (long) (t * (size_t) c.head_size), c.head_size, 0); }
    }
    return rows;
}

struct answer {
    bool is_image;
    bytes_t codes, params;
};

static answer read_image(const kvq_codec & c, const rows_t & rows, const uint8_t * shared, bool marked, bool fast) {
    const kvq_type_traits * t = kvq_traits(c.type);
    answer a = { false, room_for(t->nb_codes(c)), room_for(t->nb_params(c)) };
    a.is_image = (fast ? kvq_cpu_image_read : kvq_image_read)(
        c, rows.data(), shared, shared ? nullptr : a.codes.data(), a.params.data(), marked);
    return a;
}

static int n_images, n_others;

static void compare_reading(const kvq_codec & c, const rows_t & rows, const uint8_t * shared, const char * what) {
    for (const bool marked : { false, true }) {
        const answer want = read_image(c, rows, shared, marked, false),
                     have = read_image(c, rows, shared, marked, true);
        CHECK(want.is_image == have.is_image, "%s: type %d role %d bits %d group %d scale %d cells %d head %d split %d",
            what, c.type, c.role, c.bits, c.group, c.scale, c.n_cells, c.head_size, c.split);
        (want.is_image ? n_images : n_others)++;
        if (!want.is_image) { continue; }
        CHECK(want.params == have.params && want.codes == have.codes,
            "%s: other codes, type %d role %d bits %d group %d scale %d cells %d head %d split %d", what, c.type,
            c.role, c.bits, c.group, c.scale, c.n_cells, c.head_size, c.split);
    }
}

static void compare_decoding(const kvq_codec & c, const bytes_t & codes, const bytes_t & params, rows_t & image) {
    rows_t rows(image.size());
    kvq_image_write(c, codes.data(), params.data(), image.data());
    kvq_cpu_image_write(c, codes.data(), params.data(), rows.data());
    CHECK(rows == image, "other rows: type %d role %d bits %d group %d scale %d cells %d head %d split %d", c.type,
        c.role, c.bits, c.group, c.scale, c.n_cells, c.head_size, c.split);
}

static void compare_encoding(const kvq_codec & c, const rows_t & rows) {
    const kvq_type_traits * t = kvq_traits(c.type);
    std::vector<uint8_t> valid((size_t) c.n_cells / 8);
    for (uint8_t & x : valid) { x = random_byte(); }
    bytes_t codes[2], params[2];
    for (int fast = 0; fast < 2; fast++) {
        codes[fast] = room_for(t->nb_codes(c));
        params[fast] = room_for(t->nb_params(c));
        (fast ? kvq_cpu_encode : t->encode)(
            c, rows.data(), valid.data(), nullptr, codes[fast].data(), params[fast].data());
    }
    CHECK(codes[0] == codes[1] && params[0] == params[1],
        "another block: bits %d group %d scale %d cells %d head %d split %d", c.bits, c.group, c.scale, c.n_cells,
        c.head_size, c.split);
}

static void compare_assigning(const kvq_codec & c, const rows_t & rows, const bytes_t & params) {
    bytes_t want(kvq_traits(c.type)->nb_codes(c), 0), have(want);
    kvq_lattice_assign(c, rows.data(), want.data(), params.data());
    kvq_cpu_assign(c, rows.data(), have.data(), params.data());
    CHECK(
        want == have, "other nearest codes: bits %d group %d head %d split %d", c.bits, c.group, c.head_size, c.split);
}

static void one_page() {
    const kvq_codec c = random_codec();
    const kvq_type_traits * t = kvq_traits(c.type);
    const rows_t rows = random_rows(c);
    bytes_t codes = room_for(t->nb_codes(c)), params = room_for(t->nb_params(c));
    const bool foreign = uniform(0, 5) == 0;
    if (c.type == KVQ_TYPE_MIXED) {
        for (uint8_t & x : params) { x = random_byte(); }
    }
    t->encode(c, rows.data(), nullptr, nullptr, codes.data(), params.data());
    for (uint8_t & x : codes) { x = foreign ? random_byte() : x; }
    for (size_t i = 0; foreign && i < params.size(); i++) { params[i] = uniform(0, 1) ? random_byte() : params[i]; }
    rows_t image(rows.size());
    compare_decoding(c, codes, params, image);
    if (c.type == KVQ_TYPE_LATTICE) {
        compare_encoding(c, rows);
        compare_assigning(c, rows, params);
    }
    const uint8_t * const shared = c.type == KVQ_TYPE_AFFINE && c.bits && uniform(0, 3) == 0 ? codes.data() : nullptr;
    compare_reading(c, image, shared, "as it was");
    compare_reading(c, rows, shared, "no image");
    const int plane = kvq_image_width(image.size(), params.size());
    for (int k = 0; k < 3; k++) { // bits of a mark, then damage
        rows_t other = image;
        for (size_t i = 0; plane < 10 && i < other.size(); i++) {
            if (kvq_mark_covers(c, i)) { other[i] = (uint16_t) (other[i] ^ uniform(0, 1) << plane); }
        }
        compare_reading(c, other, shared, "marked");
        const int n = k ? uniform(1, 4) : 0;
        for (int i = 0; i < n; i++) { other[(size_t) uniform(0, (int) other.size() - 1)] ^= 1 << uniform(0, 15); }
        compare_reading(c, other, shared, "damaged and marked");
        other = image;
        for (int i = 0; i < n; i++) { other[(size_t) uniform(0, (int) other.size() - 1)] ^= 1 << uniform(0, 15); }
        compare_reading(c, other, shared, "damaged");
    }
}

static void bit_streams() {
    const size_t n = (size_t) uniform(1, 40) * 8, nb = (size_t) uniform(0, (int) n * 9 / 8);
    const int w = kvq_image_width(n, nb), low = uniform(0, 16 - w);
    rows_t rows(n), want;
    bytes_t bytes = room_for(nb), back = room_for(nb);
    for (uint16_t & x : rows) { x = (uint16_t) uniform(0, 0xffff); }
    for (uint8_t & x : bytes) { x = random_byte(); }
    want = rows;
    for (size_t bit = 0; bit < n * (size_t) w; bit++) {
        uint16_t & x = want[bit / (size_t) w];
        const int at = low + (int) (bit % (size_t) w), v = bit < 8 * nb ? bytes[bit / 8] >> bit % 8 & 1 : 0;
        x = (uint16_t) ((x & ~(1 << at)) | v << at);
    }
    kvq_image_put(n, rows.data(), low, nb, bytes.data());
    CHECK(rows == want, "%zu bytes in %zu values from bit %d", nb, n, low);
    CHECK(kvq_image_take(n, rows.data(), low, nb, back.data()) && back == bytes, "%zu bytes of %zu values", nb, n);
    const size_t behind = 8 * nb + (size_t) uniform(0, 7);
    if (w && behind < n * (size_t) w) {
        rows[behind / (size_t) w] ^= (uint16_t) (1 << (low + (int) (behind % (size_t) w)));
        CHECK(!kvq_image_take(n, rows.data(), low, nb, back.data()), "a bit behind %zu bytes", nb);
    }
}

static void hashes() {
    const int n = uniform(0, 70), width = 4 * uniform(1, 80) + (uniform(0, 3) ? 0 : 1);
    bytes_t memory(2 * (size_t) n * (size_t) width + 1);
    uint8_t * const rows = memory.data() + uniform(0, 1);
    for (int i = 0; i < n * width; i++) {
        const uint16_t x = (uint16_t) (uniform(0, 0xffff) & ~0x0400);
        memcpy(rows + 2 * (size_t) i, &x, 2);
    }
    std::vector<uint64_t> have((size_t) n);
    CHECK(kvq_cpu_hash_rows(rows, n, width, have.data()), "all are finite");
    for (int i = 0; i < n; i++) {
        const uint8_t * row = rows + 2 * (size_t) i * (size_t) width;
        CHECK(have[(size_t) i] == kvq_hash_bytes(row, 2 * (size_t) width, KVQ_HASH_ROW), "row %d of %d", i, n);
    }
    if (!n) { return; }
    const uint16_t bad = (uint16_t) (pick({ 0x7c00, 0xfc00, 0x7e00, 0x7c01, 0xffff }));
    memcpy(rows + 2 * (size_t) uniform(0, n * width - 1), &bad, 2);
    CHECK(!kvq_cpu_hash_rows(rows, n, width, have.data()), "%04x is not finite", bad);
}

// Rows on their way into blocks and back (policy/transform.h), by the formula: value by value, each product and sum
// rounded by itself.
static std::vector<float> turned(const kvq_rotary & r, int32_t pos, bool inverse, std::vector<float> x) {
    std::vector<float> angles((size_t) r.n_dims);
    kvq_rotary_turn(r, pos, inverse, angles.data());
    const size_t n = (size_t) r.n_dims / 2;
    for (size_t i = 0; i < n; i++) {
        float &a = x[r.neox ? i : 2 * i], &b = x[r.neox ? i + n : 2 * i + 1];
        const float c = angles[i], s = angles[n + i];
        const volatile float ac = a * c, bs = b * s, as = a * s, bc = b * c; // no fused multiply-add
        a = ac - bs;
        b = as + bc;
    }
    return x;
}

static void turned_rows() {
    kvq_lane_layout l;
    l.codec.head_size = pick({ 16, 40, 64, 72, 80, 128, 256 });
    l.page_cells = pick({ 32, 64, 96 });
    l.n_head = 2;
    const size_t D = (size_t) l.codec.head_size, n = (size_t) l.page_cells, h = (size_t) uniform(0, 1);
    const size_t stride = uniform(0, 1) ? D : (size_t) l.head_stride();
    kvq_rope rope;
    rope.n_dims = uniform(0, 2) ? (int) D : (int) D / 2 / 2 * 2;
    rope.neox = uniform(0, 1);
    kvq_rotor rotor(rope);
    std::vector<int32_t> now(n), was(n);
    const int first = uniform(-3, 200), moved = uniform(0, 3); // 0: all stay, 1: all moved, 2: some, 3: in no order
    for (size_t t = 0; t < n; t++) {
        now[t] = moved == 3 ? uniform(-1, 900) : first + (int) t;
        was[t] = now[t] + (moved == 1 || (moved > 1 && uniform(0, 1)) ? uniform(1, 90) : 0);
        rotor.cover(std::max(now[t], was[t]));
    }
    const auto numbers = [](size_t count) {
        std::vector<float> x(count);
        for (float & y : x) { y = uniform(0, 9) ? (float) uniform(-4000, 4000) / 1000.0f : 0.0f; }
        return x;
    };
    const std::vector<float> mean = numbers(2 * D), pred = numbers(n * (2 * D + 3));
    std::vector<float> gain(2 * D), gain_back(2 * D);
    std::vector<uint16_t> channel(2 * D);
    for (size_t i = 0; i < 2 * D; i++) {
        channel[i] = (uint16_t) (i % D);
        std::swap(channel[i], channel[i / D * D + (size_t) uniform(0, (int) (i % D))]);
        gain[i] = (float) uniform(1, 4000) / 1000.0f;
        gain_back[i] = 1.0f / gain[i];
    }
    const kvq_order order = { channel.data(), gain.data(), gain_back.data() };
    kvq_row_transform x;
    if (uniform(0, 3)) { x.mean = mean.data(); }
    if (uniform(0, 3)) { x.rotary = &rotor.view(); }
    x.positions = now.data();
    if (uniform(0, 3)) { x.sealed = was.data(); }
    if (uniform(0, 1)) { x.pred = pred.data(); }
    x.pred_stride = 2 * D + 3;
    if (uniform(0, 1)) { x.order = &order; }
    rows_t rows(n * stride);
    for (uint16_t & y : rows) { y = (uint16_t) uniform(0, 0xffff); }
    for (size_t i = 0; i < rows.size(); i++) {
        if ((rows[i] & 0x7c00) == 0x7c00 && uniform(0, 3)) { rows[i] &= 0x83ff; }
    }
    for (const bool back : { false, true }) {
        rows_t have = rows;
        (back ? kvq_cpu_put_back_rows : kvq_cpu_take_out_rows)(l, (int) h, x, have.data(), (int) stride);
        for (size_t t = 0; t < n; t++) {
            std::vector<float> row(D), mu(x.mean ? &mean[h * D] : nullptr, x.mean ? &mean[h * D] + D : nullptr), own(D);
            mu.resize(D);
            for (size_t c = 0; c < D; c++) { row[c] = kvq_f16_to_f32(rows[t * stride + c]); }
            const bool stays = x.rotary && x.sealed && now[t] == was[t];
            const auto sort = [&](bool to) {
                for (size_t i = 0; x.order && i < D; i++) {
                    const size_t j = h * D + i;
                    (back ? own[channel[j]] : own[i]) = back ? row[i] * gain_back[j] : row[channel[j]] * gain[j];
                }
                if (x.order && to == back) { row = own; }
            };
            sort(true);
            if (x.rotary && !stays && !back) { row = turned(*x.rotary, now[t], true, row); }
            if (x.rotary && !stays && back && x.sealed) { row = turned(*x.rotary, was[t], true, row); }
            std::vector<float> said(D, 0.0f);
            if (x.pred) { std::copy_n(&pred[t * x.pred_stride + h * D], D, said.begin()); }
            for (size_t c = 0; x.mean && stays && c < D; c++) { // what is said of a row is turned as its mean is
                mu[c] += said[c];
                said[c] = 0.0f;
            }
            if (x.mean && stays) { mu = turned(*x.rotary, now[t], false, mu); }
            for (size_t c = 0; c < D; c++) {
                const float p = said[c];
                row[c] = back ? row[c] + p + mu[c] : row[c] - mu[c] - p;
            }
            if (x.rotary && !stays && back) { row = turned(*x.rotary, now[t], false, row); }
            if (x.rotary && !stays && !back && x.sealed) { row = turned(*x.rotary, was[t], false, row); }
            sort(false);
            for (size_t c = 0; c < stride; c++) {
                const uint16_t got = have[t * stride + c];
                if (c >= D) {
                    CHECK(got == rows[t * stride + c], "a row wrote behind its %zu channels", D);
                    continue;
                }
                const float y = row[c] < -65504.0f ? -65504.0f : row[c] > 65504.0f ? 65504.0f : row[c];
                CHECK(got == kvq_f32_to_f16(y) || (std::isnan(y) && std::isnan(kvq_f16_to_f32(got))),
                    "%s, cell %zu, channel %zu of %zu: %04x, not %04x (neox %d, moved %d)", back ? "back" : "out", t, c,
                    D, got, kvq_f32_to_f16(y), rope.neox, moved);
            }
        }
    }
}

int main(int argc, char ** argv) {
    const int n = argc > 1 ? atoi(argv[1]) : 400;
    const std::string seed = argc > 2 ? argv[2] : "1";
    if (!getenv("KVQ_ISA")) {
#if defined(__x86_64__)
        const std::initializer_list<const char *> sets = { "portable", "avx2", "avx512-vnni", "avx512-amx" };
#else
        const std::initializer_list<const char *> sets = { "portable", "neon-dot" };
#endif
        for (const char * isa : sets) {
            setenv("KVQ_ISA", isa, 1);
            const std::string command = std::string(argv[0]) + " " + std::to_string(n) + " " + seed + " 2>&1";
            CHECK(system(command.c_str()) == 0, "%s", isa);
        }
        return 0;
    }
    rng.seed((unsigned) atoi(seed.c_str()));
    for (int i = 0; i < n; i++) {
        one_page();
        bit_streams();
        hashes();
        turned_rows();
    }
    CHECK(n < 100 || (n_images > 100 && n_others > 100), "%d images, %d others", n_images, n_others);
    printf("%s: %d pages, read as images %d times of %d\n", kvq_kernel_name(), n, n_images, n_images + n_others);
    return 0;
}
