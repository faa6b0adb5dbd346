// Lines for the user, on stderr, unless KVQ_QUIET or kvq_set_verbosity(0) asks for none.
#pragma once

#include <string>

void kvq_say(const std::string & line); // behind those that wait

// When the process ends, or before the next line. Programs of llama.cpp print their text in a thread of its own, which
// is behind when the cache is freed: with both streams in one pipe a line said at once would stand inside the text.
void kvq_say_at_end(const std::string & line);
