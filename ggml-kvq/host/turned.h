// llama.cpp turns queries, keys and values of a cache that it declares in a quantised type by a Hadamard matrix, in
// blocks of 64 channels and more, and turns the output of attention back (LLAMA_ATTN_ROT_DISABLE=1: it does not).
// Sealing, means, rotary embeddings and saved states here want rows as they are under f16. So a turn that stands in one
// graph with its node of ours is left out: a copy stands in its place (kvq_leave_turns_out). A debugger may ask for
// each node by itself, in a graph of its own. There the CPU undoes the turn where rows and queries come in, and does it
// again to the output: the matrix is its own inverse.
#pragma once

#include <cstdint>
#include <vector>

struct ggml_cgraph;
struct ggml_tensor;
struct kvq_step;

// Channels of the block by which the tensor was turned, 0: it was not. x: as a node of ours reads it, so what lies
// before it may be views.
int kvq_turn_of(const ggml_tensor * x);

// That turn itself, NULL: there is none.
const ggml_tensor * kvq_turn_node(const ggml_tensor * x);

// Makes step.nodes, where graph has turns to leave out, and tells its parts (step.h).
void kvq_leave_turns_out(ggml_cgraph * graph, kvq_step & step);

// The node before turns, views and copies: of keys, their rotary embedding.
const ggml_tensor * kvq_before_turn(const ggml_tensor * x);

// n_rows rows of `width` channels, row i at x + i*stride: turned in place, in blocks of `block` channels.
void kvq_turn_rows(float * x, int64_t n_rows, int64_t stride, int width, int block, int n_threads);
// The same of a copy, whose rows lie side by side in `to`.
const float * kvq_turned(
    const float * x, int64_t n_rows, int64_t stride, int width, int block, int n_threads, std::vector<float> & to);
