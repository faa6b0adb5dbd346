// Every environment variable that the library reads (settings.inc). A variable is read when it is needed, so that a
// program may set one between two caches. A value that cannot be read (letters in place of a number) counts as not
// set, and one line says so when a cache is made (kvq_setting_fault).
#pragma once

#include <cstdlib>
#include <cstring>
#include <string>

enum class kvq_setting {
#define KVQ_SETTING(id, name, kind, what) id,
#include "settings.inc"
#undef KVQ_SETTING
    COUNT
};

enum class kvq_setting_kind { TEXT, NUMBER, FILE };

struct kvq_setting_row {
    const char * name;
    kvq_setting_kind kind;
    const char * what;
};

static inline const kvq_setting_row & kvq_setting_of(kvq_setting s) {
    static const kvq_setting_row rows[] = {
#define KVQ_SETTING(id, name, kind, what) { name, kvq_setting_kind::kind, what },
#include "settings.inc"
#undef KVQ_SETTING
    };
    return rows[(int) s];
}

// "" when it is not set; the name of a file is more than blanks
static inline const char * kvq_setting_text(kvq_setting s) {
    const kvq_setting_row & row = kvq_setting_of(s);
    const char * v = getenv(row.name);
    return v && (row.kind != kvq_setting_kind::FILE || v[strspn(v, " \t\r\n")]) ? v : "";
}

// A number from 0 to 999999999; otherwise: when it is not set.
static inline int kvq_setting_number(kvq_setting s, int otherwise) {
    const char * v = kvq_setting_text(s);
    const size_t n = strlen(v);
    return n && n < 10 && strspn(v, "0123456789") == n ? atoi(v) : otherwise;
}

// A switch: 0 is off, another number on; otherwise: when it is not set.
static inline bool kvq_setting_on(kvq_setting s, bool otherwise) { return kvq_setting_number(s, otherwise) != 0; }

// Why its value is not used, and the cure; "": the value is used, or the variable is not set.
static inline std::string kvq_setting_fault(kvq_setting s) {
    const kvq_setting_row & row = kvq_setting_of(s);
    const char * v = getenv(row.name);
    if (!v || !*v) { return ""; }
    if (row.kind == kvq_setting_kind::NUMBER && kvq_setting_number(s, -1) < 0) {
        return std::string(row.name) + "=" + v + " is not used: write a whole number (" + row.what + ") or unset it";
    }
    if (row.kind == kvq_setting_kind::FILE && !*kvq_setting_text(s)) {
        return std::string(row.name) + " is blank and not used: name a file (" + row.what + ") or unset it";
    }
    return "";
}
