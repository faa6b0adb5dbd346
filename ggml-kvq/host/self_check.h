// What layouts.inc and op_params.h say, proved on the ggml of the process before it gets a device of ours.
#pragma once

#include <string>

// After kvq_bind_ggml and kvq_choose_layout. False with one line that names the first thing that is elsewhere.
bool kvq_check_ggml(std::string & err);
