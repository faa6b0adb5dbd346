// Memory of the host that this process may still take.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>

// Reads a number from a file. The file has lines "key number"; with an empty key the number stands there alone.
// Returns `none` when the file or the line is missing, or when a word stands in the number's place ("max").
static inline uint64_t kvq_number_in(const std::string & path, const std::string & key, uint64_t none) {
    std::ifstream file(path);
    std::string word;
    while (file >> word) {
        if (!key.empty() && word != key) { continue; }
        if (!key.empty()) { file >> word; }
        char * end = nullptr;
        const uint64_t x = strtoull(word.c_str(), &end, 10);
        return end != word.c_str() ? x : none;
    }
    return none;
}

// Bytes below the limit of a control group, whose files that are not in use count as free; SIZE_MAX: it has no limit.
// names: of version 2 or of version 1
struct kvq_group_names {
    const char *most, *now, *files;
};
static inline size_t kvq_room_in_group(const std::string & folder, const kvq_group_names & names) {
    const uint64_t most = kvq_number_in(folder + names.most, "", UINT64_MAX);
    const uint64_t now = kvq_number_in(folder + names.now, "", UINT64_MAX);
    if (most > (uint64_t) 1 << 60 || now == UINT64_MAX) { return SIZE_MAX; } // version 1 has no word for "no limit"
    const uint64_t files = kvq_number_in(folder + "/memory.stat", names.files, 0);
    return (size_t) (most + files - std::min(most + files, now));
}

// The least of what the machine has and of what the groups of this process and those above them allow: Linux ends a
// process that takes more. SIZE_MAX: neither the machine nor a group tells a limit.
static inline size_t kvq_host_available() {
    const uint64_t kib = kvq_number_in("/proc/meminfo", "MemAvailable:", UINT64_MAX);
    size_t room = kib == UINT64_MAX ? SIZE_MAX : (size_t) kib << 10;
    std::ifstream groups("/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) { // 0::/GROUP, or of version 1 4:memory:/GROUP
        const size_t at = line.find(":/");
        const bool now = !line.compare(0, 3, "0::"), before = line.find(":memory:") != std::string::npos;
        if (at == std::string::npos || !(now || before)) { continue; }
        const kvq_group_names names = now
            ? kvq_group_names{ "/memory.max", "/memory.current", "inactive_file" }
            : kvq_group_names{ "/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file" };
        const std::string root = now ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
        for (std::string group = line.substr(at + 1); !group.empty(); group.resize(group.rfind('/'))) {
            room = std::min(room, kvq_room_in_group(root + group, names));
        }
        room = std::min(room, kvq_room_in_group(root, names)); // all that a container sees
    }
    return room;
}
