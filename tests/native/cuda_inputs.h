// Part of test_cuda.cpp: inputs of a step are held on the host and come to the device all at once, each whole and
// nothing beside it. Copies of many pieces do not go from one allocation into the next.
#pragma once

#include "cuda/device/inputs.h"
#include "device_bytes.h"

static void check_inputs(kvq_cuda_device & d) {
    const size_t sizes[] = { 4, 8, 13, 16, 512, 4099, 66048, 262144 };
    kvq_cuda_inputs inputs(0);
    for (int round = 0; round < 3; round++) { // the second one writes memory that a kernel may still read
        std::vector<std::unique_ptr<device_bytes>> to;
        std::vector<std::vector<uint8_t>> put, before;
        for (size_t nb : sizes) {
            before.push_back(std::vector<uint8_t>(nb + 16, (uint8_t) (200 + round)));
            to.emplace_back(new device_bytes(d, nb + 16, before.back().data()));
            put.push_back(std::vector<uint8_t>(nb));
            for (uint8_t & x : put.back()) { x = (uint8_t) rng(); }
            CHECK(inputs.hold(to.back()->p, put.back().data(), nb), "%zu bytes are not held", nb);
            CHECK(to.back()->get<uint8_t>() == before.back(), "%zu bytes came before they were sent", nb);
        }
        CHECK(!inputs.hold(to[4]->p, put[4].data(), 16) && !inputs.hold((char *) to[5]->p + 4096, put[5].data(), 3),
            "what overlaps is held");
        CHECK(!inputs.hold((char *) to[5]->p + 4097, put[5].data(), 3), "what does not begin at 16 bytes is held");
        CHECK(inputs.pieces().size() == put.size(), "%zu of %zu pieces", inputs.pieces().size(), put.size());
        CHECK(inputs.send(nullptr) && inputs.pieces().empty(), "inputs cannot be sent");
        d.synchronize();
        for (size_t i = 0; i < to.size(); i++) {
            std::vector<uint8_t> expected = before[i];
            std::copy(put[i].begin(), put[i].end(), expected.begin());
            CHECK(to[i]->get<uint8_t>() == expected, "%zu bytes came otherwise", sizes[i]);
        }
    }
    device_bytes many(d, 64 * 16);
    const std::vector<uint8_t> large((size_t) 1 << 19);
    CHECK(!inputs.hold(many.p, large.data(), large.size()), "a large piece is held");
    int n = 0;
    for (; n < 64 && inputs.hold((char *) many.p + 16 * n, large.data(), 16); n++) {}
    CHECK(n > 7 && n < 64, "%d pieces are held", n);
    inputs.drop();
    CHECK(inputs.hold(many.p, large.data(), 16), "nothing is held behind a drop");
    printf("inputs: %zu sizes, %d pieces at once\n", sizeof(sizes) / sizeof(*sizes), n);
}

// Allocations that begin where another one ends, in pieces of a third: CUDA refuses a copy over both.
static void check_copies(kvq_cuda_device & d) {
    constexpr size_t NB = 6u << 20, PIECE = NB / 3; // CUDA gives whole units of 2 MiB
    std::vector<std::unique_ptr<device_bytes>> all;
    for (int i = 0; i < 8; i++) { all.emplace_back(new device_bytes(d, NB)); }
    std::sort(all.begin(), all.end(), [](const auto & a, const auto & b) { return a->p < b->p; });
    std::vector<uint8_t> from(all.size() * NB), back(from.size(), 0);
    for (auto & x : from) { x = (uint8_t) rng(); }
    std::vector<kvq_copy_job> put, get;
    int n_neighbours = 0;
    for (size_t i = 0; i < all.size(); i++) {
        n_neighbours += i && (uint8_t *) all[i - 1]->p + NB == all[i]->p;
        for (size_t at = 0; at < NB; at += PIECE) {
            put.push_back({ (uint8_t *) all[i]->p + at, &from[i * NB + at], PIECE });
            get.push_back({ &back[i * NB + at], (uint8_t *) all[i]->p + at, PIECE });
        }
    }
    d.put_all(put.data(), put.size(), 1);
    d.get_all(get.data(), get.size());
    CHECK(d.error().empty() && back == from, "%s", d.error().c_str());
    printf("copies: %d pieces, %d of %d allocations begin where another one ends\n", (int) put.size(), n_neighbours,
        (int) all.size());
}
