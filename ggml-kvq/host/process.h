// The ggml of the process. libggml-kvq.so is linked to no ggml: it binds the functions of ggml_functions.inc, by name,
// to the ggml that loads it, whatever the file is called that holds them. So one file serves every llama.cpp.
#pragma once

#include <string>

// The ggml that the code at `caller` belongs to, or that of the process when that code is no ggml (a Python that calls
// ggml_backend_init by itself). False with one line in err: none is there, it hides its functions, or it lacks one.
bool kvq_bind_ggml(const void * caller, std::string & err);

// Of a KVQ_GGML_OPTIONAL; NULL: the ggml of the process has none.
void * kvq_optional_function(const char * name);
#define KVQ_OPTIONAL(name) ((decltype(&name)) kvq_optional_function(#name))

// The file that holds the functions, for messages.
std::string kvq_ggml_file(void);
