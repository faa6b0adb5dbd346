// Functions behind the CPU's engine (engine/engine.h); device.cpp calls them.
#pragma once

#include "engine/engine.h"

// rows.cpp
// coordinates of tiles as they came, into x[i].coords
void kvq_cpu_take_coords(
    const kvq_lane_layout & l, int n, const uint16_t * const * tiles, const kvq_row_transform * x, int n_threads);
void kvq_cpu_take_out(const kvq_lane_layout & l, int n, const uint16_t * const * tiles, uint16_t * const * out,
    const kvq_row_transform * x, int n_threads);
void kvq_cpu_put_back(const kvq_lane_layout & l, uint16_t * tile, const kvq_row_transform & x);

// chain.cpp
void kvq_cpu_chain_predict(const kvq_chain_pages & c, float * out);
void kvq_cpu_chain_step(const kvq_chain_pages & c);
// of one stream; lanes[0] keys, lanes[1] values; l == NULL: that lane is stored
void kvq_cpu_attend_predicted(const kvq_attn & attn, const kvq_chain_pages * lanes, int n_threads);

// scores.cpp
void kvq_cpu_choose(const kvq_lane_layout & l, bool normalise, const kvq_choice * pages, int n);
void kvq_cpu_pack(const kvq_lane_layout & l, bool normalise, const kvq_pack_page * pages, int n, kvq_packed & out);
void kvq_cpu_gather(const kvq_lane_layout & l, int n, uint16_t * const * tiles, const int32_t * const * maps,
    const uint16_t * const * frames, int first, int n_frames);
