// Data of a model that nobody gave and that were measured once: the launchers and Model write them into the cache
// folder, the library finds them there by what the model's file holds, whatever its name and folder.
#pragma once

#include <string>

// means/FINGERPRINT.kvq.gguf in $KVQ_CACHE_DIR, else in $XDG_CACHE_HOME/ggml-kvq, else in ~/.cache/ggml-kvq. "": the
// model cannot be read.
std::string kvq_measured_path(const std::string & model);

// The one GGUF model that is mapped into this process; of several that the command line names (`named`), the one of
// them that is. "": none, or nobody can tell which.
std::string kvq_mapped_model(const std::string & named = "");
