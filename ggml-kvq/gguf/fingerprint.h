// Is a file of calibrated data whole, and is it of this model?
//   kvq.checksum       CRC-32 of everything named kvq.* in it, in hexadecimal
//   kvq.model.sketch   f32, 50 values a layer: what the model's weights are, whatever their quantisation
//
// A layer of a sketch: types of its key and value projections (0: the file lacks it), 16 sums of each, every one a
// row of the projection with signs drawn by chance, and 16 weights of the norm before attention. Norms are never
// quantised. A sum of other weights is another number altogether, one of quantised weights differs by their error:
// sums 0.7 of their size apart are of another model, which is refused; other norms, sums further apart than the
// quantisation explains, or any difference under the same types are another fine-tune, which is noted.
#pragma once

#include "cache/config.h"

#include <string>
#include <vector>

struct gguf_context;

constexpr int KVQ_SKETCH = 50; // values a layer

// Empty: the file cannot be read. Layers whose tensors are not in it (one file of several) are zeros.
std::vector<float> kvq_make_sketch(const std::string & model);

// Why an open file of calibrated data is of another format than this library reads, or of another model than `model`
// (arch "": not known); "": it is neither.
std::string kvq_refuse_format(const gguf_context * g);
std::string kvq_refuse_model(const gguf_context * g, const kvq_model_info & model);

// Data in `path` (a sidecar, or a model file that holds it) for the model in `model_path` ("": not known), which
// `model` is of. note: one line, or "".
kvq_status kvq_check_calibrated(const std::string & path, const std::string & model_path, const kvq_model_info & model,
    std::string & note, std::string & err);
