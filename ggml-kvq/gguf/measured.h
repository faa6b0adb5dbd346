// Data of a model that were measured once, because the user gave no data. The launchers and Model write them into the
// cache folder, the library finds them there by what the model's file holds, whatever its name and folder.
#pragma once

#include <string>

// The numbers are those of kvq_measured.
enum class kvq_first_use { MEANS, PREDICTORS, COORDINATES };

// means/FINGERPRINT.kvq.gguf in $KVQ_CACHE_DIR, else in $XDG_CACHE_HOME/ggml-kvq, else in ~/.cache/ggml-kvq; where the
// file holds more than means: FINGERPRINT.predictors.kvq.gguf, FINGERPRINT.coordinates.kvq.gguf. "": the model cannot
// be read.
std::string kvq_measured_path(const std::string & model, kvq_first_use what);

// Does this process have a device whose memory is its own? Set by the host where there can be one; NULL: no.
extern bool (*kvq_has_accelerator)();
