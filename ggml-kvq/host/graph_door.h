// The device's side of ggml-kvq-graph.h.
#pragma once

#include "ggml.h"

bool kvq_graph_op_supported(const ggml_tensor * op); // one of our nodes, as our functions built it
void kvq_graph_op_compute(ggml_tensor * op, int n_threads);
