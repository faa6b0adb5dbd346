#include "lines.h"

#include "base/settings.h"
#include "config.h"

#include <atomic>
#include <cstdio>
#include <mutex>

static std::atomic<int> verbosity{ -1 }; // contexts are made in several threads

int kvq_verbosity(void) {
    if (verbosity < 0) { verbosity = kvq_setting_on(kvq_setting::QUIET, false) ? 0 : 1; }
    return verbosity;
}

extern "C" void kvq_set_verbosity(int level) { verbosity = level < 0 ? 0 : level; }

// Plain memory: a C++ object of this library might be gone when the process ends.
static std::string * waiting = nullptr;
static std::mutex mutex;

static void say_those_that_wait(void) {
    if (!waiting) { return; }
    fflush(stdout);
    fputs(waiting->c_str(), stderr);
    delete waiting;
    waiting = nullptr;
}

void kvq_say(const std::string & line) {
    if (kvq_verbosity() <= 0) { return; }
    const std::lock_guard<std::mutex> lock(mutex);
    say_those_that_wait();
    fprintf(stderr, "%s\n", line.c_str());
}

void kvq_say_at_end(const std::string & line) {
    if (kvq_verbosity() <= 0) { return; }
    const std::lock_guard<std::mutex> lock(mutex);
    if (!waiting) { waiting = new std::string; }
    *waiting += line + "\n";
}

// Runs when the loader unloads libraries: behind the destructors of the program's own objects, which print the rest of
// its text.
__attribute__((destructor)) static void end(void) { say_those_that_wait(); }
