// Blocks of pages of slots (evict.h): the engine sorts cells and moves rows, the host decides which pages stay.
#include "evict.h"

#include "engine/host.h"

#include <algorithm>

// Pages that the runs would fill. A cell that no head holds, and a row that was evicted before it was saved, take no
// slot.
std::vector<kvq_evict::candidate> kvq_evict::pack(
    int s, const std::vector<run> & runs, bool judged, kvq_packed & packed) const {
    const kvq_lane & k = *lane[0];
    const size_t nb_bits = (size_t) page_cells / 8, n_map = (size_t) n_head * page_cells;
    std::vector<kvq_pack_page> pages;
    std::vector<int> of_run;
    for (const run & r : runs) {
        of_run.insert(of_run.end(), r.pages.size(), (int) (&r - runs.data()));
        const int first = (int) pages.size();
        for (int p : r.pages) {
            const kvq_choice c = scores->choice(s, p, nullptr, nullptr);
            pages.push_back(
                { c.sums, c.stale, nullptr, p * page_cells, first, (int) r.pages.size(), judged && r.of_prompt });
        }
    }
    std::vector<uint8_t> present(pages.size() * n_head * nb_bits);
    for (size_t i = 0; i < pages.size(); i++) {
        const int p = pages[i].cell / page_cells;
        pages[i].present = &present[i * n_head * nb_bits];
        const auto away = absent.find({ s, p });
        for (int h = 0; h < n_head; h++) {
            uint8_t * bits = &present[(i * n_head + h) * nb_bits];
            std::copy_n(k.valid(s, p), nb_bits, bits);
            for (int t = 0; away != absent.end() && t < page_cells; t++) {
                if (is_evicted(s, p, h, t)) { bits[t / 8] &= (uint8_t) ~(1 << t % 8); }
            }
        }
    }
    device->scores()->pack(k.layout(), scores->normalises(), pages.data(), (int) pages.size(), packed);
    std::vector<candidate> out;
    for (size_t i = 0; i < pages.size(); i++) {
        candidate c;
        c.place = (int) i;
        c.run = of_run[i];
        c.index = (int) i - pages[i].first;
        c.map.assign(packed.maps.begin() + (long) (i * n_map), packed.maps.begin() + (long) ((i + 1) * n_map));
        if (c.holds_nothing()) { continue; }
        for (int h = 0; h < n_head; h++) { c.info.score += packed.sums[i * n_head + h]; }
        out.push_back(std::move(c));
    }
    return out;
}

// The rows of each page of slots are gathered into a tile. Each head is a block of its own, because heads have
// different empty slots. due: open pages that seal; made: indices of the new pages of slots; places: where `packed` has
// them.
void kvq_evict::encode(bool value, int s, const std::vector<int> & due, const std::vector<int> & made,
    const kvq_packed & packed, const std::vector<int> & places, int n_threads) {
    if (made.empty()) { return; }
    kvq_lane & x = *lane[value];
    kvq_lane_layout one = x.layout();
    const size_t nb_frame = one.nb_frame, nb_head = one.nb_tile_head, n_map = (size_t) n_head * page_cells,
                 nb_valid = (size_t) page_cells / 8;
    const bool mixed = one.codec.type == KVQ_TYPE_MIXED;
    one.n_head = 1;
    // of pages due.front() + i; NULL: the page has no set
    std::vector<const uint16_t *> frames((size_t) (due.back() - due.front() + 1), nullptr);
    bool all_have_frames = true;
    for (int p : due) {
        frames[(size_t) (p - due.front())] = x.info(s, p).frame;
        all_have_frames &= x.info(s, p).frame != nullptr;
    }
    std::vector<uint16_t *> tiles;
    std::vector<const int32_t *> at;
    std::vector<uint8_t> valid(made.size() * n_head * nb_valid, 0), no_stale(nb_valid, 0), all_valid(nb_valid, 0xff);
    std::vector<kvq_page_block> blocks;
    std::vector<kvq_choice> choices;
    for (size_t j = 0; j < made.size(); j++) {
        const int i = made[j];
        int32_t * its_map = maps_there + ((size_t) s * n_store + i) * n_map;
        // keys and values share the map; keys come first
        if (!value) { device->copy_later(its_map, packed.maps_there + (size_t) places[j] * n_map, 4 * n_map); }
        at.push_back(its_map);
        tiles.push_back(x.scratch->take(nb_frame));
        for (int h = 0; h < n_head; h++) {
            uint8_t * bits = &valid[(j * n_head + h) * nb_valid];
            for (int t = 0; t < page_cells; t++) {
                const int32_t cell = map(s, i, h)[t];
                if (cell >= 0 && (all_have_frames || frames[(size_t) (cell / page_cells - due.front())])) {
                    bits[t / 8] |= (uint8_t) (1 << t % 8);
                }
            }
            // values take the salient slots that the keys chose
            if (mixed && value) { device->copy(x.params_at(s, i, h), lane[0]->params_at(s, i, h), nb_valid); }
            blocks.push_back({ tiles[j] + h * nb_head / 2, bits, nullptr, x.codes_at(s, i, h), x.params_at(s, i, h) });
        }
        if (mixed && !value) {
            choices.push_back({ packed.scores_there + (size_t) places[j] * n_map, all_valid.data(), no_stale.data(),
                x.params_at(s, i, 0) });
        }
    }
    device->scores()->gather(
        x.layout(), (int) tiles.size(), tiles.data(), at.data(), frames.data(), due.front(), (int) frames.size());
    if (!choices.empty()) { device->scores()->choose(x.layout(), false, choices.data(), (int) choices.size()); }
    device->encode(one, blocks.data(), (int) blocks.size(), n_threads);
    for (uint16_t * t : tiles) { x.scratch->give(t, nb_frame); }
}

// From the host. Of a mixed block the set of salient slots is there already.
void kvq_evict::encode_rows(
    bool value, int s, int i, int h, const std::vector<uint16_t> & block, const uint8_t * valid) {
    kvq_lane & x = *lane[value];
    const kvq_lane_layout & l = x.layout();
    uint8_t *codes = x.codes_at(s, i, h), *params = x.params_at(s, i, h);
    std::vector<uint8_t> c(l.nb_codes), q(l.nb_params);
    device->get(q.data(), params, q.size());
    kvq_cpu_encode(l.codec, block.data(), valid, nullptr, c.data(), q.data());
    device->put(codes, c.data(), c.size());
    device->put(params, q.data(), q.size());
}
