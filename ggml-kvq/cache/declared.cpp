#include "declared.h"

#include <algorithm>

static const kvq_declared TYPES[] = {
    // those of equal size: the first one is taken
    { "q4_0", 32, 18 },
    { "iq4_nl", 32, 18 },
    { "q4_1", 32, 20 },
    { "q5_0", 32, 22 },
    { "q5_1", 32, 24 },
    { "q8_0", 32, 34 },
    { "f16", 1, 2 },
};

bool kvq_declared::is_served() const {
    return std::any_of(std::begin(TYPES), std::end(TYPES), [&](const kvq_declared & x) { return x.name == name; });
}

std::string kvq_needs_f16_rows(const kvq_lane_layout & l) {
    return l.evicts   ? "evicts cells"
        : l.chained   ? "predicts rows from the layer below"
        : l.bytes_far ? "has rows as they came in a second tier"
        : l.copies    ? "keeps rows of f16"
                      : "";
}

static kvq_lane_layout long_lane(const kvq_layer_plan & plan, bool value, int n_head) {
    return kvq_make_lane_layout(plan, value, n_head, 131072, 1);
}

double kvq_stored_bits(const kvq_layer_plan & plan, bool value, int n_head) {
    const kvq_lane_layout l = long_lane(plan, value, n_head);
    return 8.0 * (double) (l.bytes_codes + l.bytes_params + l.bytes_window + l.nb_beside * (size_t) l.n_pages) /
        ((double) n_head * l.codec.head_size * l.n_cells);
}

// Bits a value of the state of a prompt of 1024 tokens, of which 160 and at least the window are rows of 8 bits
// (store/small_rows.h). Rows of fewer bits would change what the model says behind a restore.
static double of_a_prompt(const kvq_lane_layout & l) {
    constexpr double PROMPT = 1024, ROWS = 160, ROW = 8.25;
    const double width = (double) l.n_head * l.codec.head_size,
                 block = 8.0 * (double) (l.bytes_codes + l.bytes_params + l.nb_beside * (size_t) l.n_pages) /
        (width * l.n_cells),
                 window = std::min(PROMPT, std::max(ROWS, (double) l.bytes_window / (2 * width)));
    return ((PROMPT - window) * block + window * ROW) / PROMPT;
}

std::string kvq_smallest_declared(const std::string & so_far, const kvq_layer_plan & plan, bool value, int n_head) {
    const kvq_lane_layout l = long_lane(plan, value, n_head);
    // llama.cpp refuses a type whose block does not divide a head
    const bool f16 = l.is_f16() || l.codec.head_size % 32 || !kvq_needs_f16_rows(l).empty();
    const double bits = f16 ? 16 : std::max(kvq_stored_bits(plan, value, n_head), of_a_prompt(l));
    const auto enough = [&](const kvq_declared & x) { return x.bits() >= bits; };
    const auto before =
        std::find_if(std::begin(TYPES), std::end(TYPES), [&](const kvq_declared & x) { return x.name == so_far; });
    const auto here = std::find_if(std::begin(TYPES), std::end(TYPES), enough), last = std::end(TYPES) - 1;
    return before == std::end(TYPES) ? std::min(here, last)->name : std::min(std::max(before, here), last)->name;
}
