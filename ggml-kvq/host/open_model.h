// The model's file, where nobody names it: bindings and servers open it by themselves.
#pragma once

#include <string>

bool kvq_is_gguf(const std::string & path);

// The one model that is mapped into this process; "": none is, or several are. Adapters, projectors and our own
// sidecars are no models.
std::string kvq_open_model(void);
