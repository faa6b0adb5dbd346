// The engines that this library was built with, besides the CPU's. Without any (no GGML_CUDA) the functions are there
// and find none: engines.cpp.
#pragma once

#include "step.h"

// cuda_device.cpp: devices KVQ<i> over CUDA<i>. kvq_cuda_stream: cuda_stream.cu, which alone knows ggml-cuda's context.
int kvq_cuda_init(ggml_backend_reg * reg); // number of devices, 0: none
ggml_backend_dev_t kvq_cuda_get(size_t index);
// buffer types of the inner device, NULL-terminated
ggml_backend_buffer_type_t * kvq_cuda_extra_bufts(ggml_backend_dev_t dev);
std::unique_ptr<kvq_device> kvq_cuda_make_device(int ordinal);
// Whose memory the caches of a buffer are, and who computes on them. kvq_other_engine: a test's, in the CPU's place.
extern std::unique_ptr<kvq_device> (*kvq_other_engine)();
kvq_device & kvq_device_of(const kvq_device_context & dev, kvq_buffer & b);
const char * kvq_cuda_refuse(const kvq_draft_layer & d);
// node: FLASH_ATTN_EXT. Many rows: the layer is expanded to f16 and the inner backend's own kernel runs on it; few:
// our kernel.
bool kvq_cuda_attend(kvq_backend_context & b, kvq_kv_cache & cache, kvq_kv_layer & layer, const ggml_tensor * node,
    int stream0, std::vector<kvq_attn> & streams, const kvq_chain_pages * predicted, kvq_run how);
void kvq_cuda_use_stream(kvq_kv_cache & cache, void * stream);
const std::string & kvq_cuda_error(kvq_kv_cache & cache);
void * kvq_cuda_stream(ggml_backend_t inner);
ggml_guid_t kvq_cuda_guid(void);            // of our backends
ggml_backend_reg_t kvq_cuda_upstream(void); // of ggml-cuda, in whatever file; NULL: the process has none

// cuda_between.cpp: what devices do with each other. comm: a function that llama.cpp asks a registry for, NULL: no such
void kvq_cuda_link_devices(ggml_backend_device_i & i);
void kvq_cuda_link_backends(ggml_backend_i & i);
void * kvq_cuda_comm(const char * name);

// May ggml-cuda make a CUDA graph of this part of its own?
void kvq_cuda_inner_graph(ggml_backend_t inner, const ggml_cgraph * part, bool may);

// cuda_inputs.cpp: nb bytes that a program sets at `to` in a plain buffer. hold: false when they have to be copied now;
// send: before a graph runs, those in its buffers; settle: those that overlap what is read or written now; drop: with
// the buffer, or when it is cleared
bool kvq_cuda_hold_input(kvq_buffer & b, int ordinal, void * to, const void * data, size_t nb);
void kvq_cuda_send_inputs(kvq_backend_context & b, const ggml_cgraph * graph);
void kvq_cuda_settle_inputs(kvq_buffer & b, const void * at, size_t nb);
void kvq_cuda_drop_inputs(kvq_buffer & b);

// cuda_step.cpp: as kvq_compute_graph, steps that repeat as one CUDA graph
ggml_status kvq_cuda_compute(kvq_backend_context & b, ggml_cgraph * graph);
void kvq_cuda_step_flush(kvq_backend_context & b); // of a recording: rows that are still held back go first
void kvq_cuda_steps_free(struct kvq_cuda_steps * steps);
