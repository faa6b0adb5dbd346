// Native tests are linked to ggml: nothing has to be bound (ggml-kvq/host/process.cpp).
#include "host/process.h"

#include <dlfcn.h>

bool kvq_bind_ggml(const void *, std::string &) { return true; }
void * kvq_optional_function(const char * name) { return dlsym(RTLD_DEFAULT, name); }
std::string kvq_ggml_file(void) { return "the ggml that this test is linked to"; }
