// Every environment variable that the library reads (settings.inc). A variable is read when it is needed, so that a
// program may set one between two caches.
#pragma once

#include <cstdlib>

enum class kvq_setting {
#define KVQ_SETTING(id, name, what) id,
#include "settings.inc"
#undef KVQ_SETTING
};

static inline const char * kvq_setting_name(kvq_setting s) {
    static const char * const names[] = {
#define KVQ_SETTING(id, name, what) name,
#include "settings.inc"
#undef KVQ_SETTING
    };
    return names[(int) s];
}

// "" when it is not set
static inline const char * kvq_setting_text(kvq_setting s) {
    const char * v = getenv(kvq_setting_name(s));
    return v ? v : "";
}

// A number; otherwise: when it is not set.
static inline int kvq_setting_number(kvq_setting s, int otherwise) {
    const char * v = getenv(kvq_setting_name(s));
    return v ? atoi(v) : otherwise;
}

// A switch: 0 is off, another number on; otherwise: when it is not set.
static inline bool kvq_setting_on(kvq_setting s, bool otherwise) {
    const char * v = getenv(kvq_setting_name(s));
    return v ? atoi(v) != 0 : otherwise;
}
