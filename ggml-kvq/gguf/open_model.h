// The model's file, where no setting names it: bindings and servers open it by themselves.
#pragma once

#include <string>

bool kvq_is_gguf(const std::string & path);

// The one GGUF model that is mapped into this process; of several that the command line names (`named`), the one of
// them that is. "": no such file, or more than one. Adapters, projectors and our own sidecars are no models.
std::string kvq_mapped_model(const std::string & named = "");
