#include "far_pool.h"

#include "base/host_memory.h"
#include "base/settings.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static constexpr size_t NB_SLAB = 64u << 20, NB_ALIGN = 4096; // pages of the system's: madvise works on them

static std::string mib(size_t nb) {
    char text[32];
    snprintf(text, sizeof(text), nb < 1 << 20 ? "%.3f MiB" : "%.1f MiB", (double) nb / 1048576.0);
    return text;
}

kvq_far_pool::kvq_far_pool(kvq_device & device, const std::string & place, size_t nb_most) :
    device(device), place(place), nb_most(nb_most) {
    if (place.find('/') != std::string::npos) { open_file(); }
}

kvq_far_pool::~kvq_far_pool() {
    for (const slab & x : slabs) {
        if (file >= 0) {
            munmap(x.memory, x.nb);
        } else if (place == "device") {
            device.free(x.memory, x.nb);
        } else {
            device.fetches()->free_far(x.memory, x.nb);
        }
    }
    if (file >= 0) { close(file); }
}

bool kvq_far_pool::open_file() {
    if (!device.is_host()) {
        why = "place=" + place + " is for the CPU: attention on " + device.name() + " takes place=host or place=device";
        return false;
    }
    file = open(place.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0) {
        const int e = errno;
        struct stat is = {};
        const bool folder = e == EEXIST && !stat(place.c_str(), &is) && S_ISDIR(is.st_mode);
        why = "place=" + place + ": " +
            (folder ? "is a folder: name a file in it that does not exist yet"
                    : e == EEXIST ? "the file exists already: name one that does not"
                                  : strerror(e) + std::string(": name a file in a folder that you may write to"));
        return false;
    }
    unlink(place.c_str());
    rlimit limit = {}; // of the process: asking for more would end it by a signal
    const bool limited = !getrlimit(RLIMIT_FSIZE, &limit) && limit.rlim_cur < kvq_pad(nb_most, NB_ALIGN);
    if (const int e =
            limited ? EFBIG : posix_fallocate(file, 0, (off_t) kvq_pad(std::max<size_t>(nb_most, 1), NB_ALIGN))) {
        why = "place=" + place + ": " + mib(nb_most) + " are needed for far rows: " + strerror(e) +
            "; lower -c, or set far=q4, which takes a quarter";
        return false;
    }
    return true;
}

void * kvq_far_pool::more(size_t size) {
    const int limit = kvq_setting_number(kvq_setting::FAR_LIMIT, -1);
    if (limit >= 0 && total + size > (size_t) limit << 20) { return nullptr; }
    if (place == "device") { return device.alloc(size); }
    // else the system would end some program
    return kvq_host_available() > size + size / 4 ? device.fetches()->alloc_far(size) : nullptr;
}

// What the user may do when there is no room for a block.
std::string kvq_far_pool::lacks(size_t nb) const {
    const std::string more = mib(kvq_pad(nb, NB_ALIGN)) + " more are needed for far rows and ",
                      wait = "; until then cells stay f16 in the window";
    if (file >= 0) {
        return "place=" + place + ": " + more +
            (total ? "the file has no room left" : "the file cannot be mapped into memory") +
            ": set far=q4, which takes a quarter, or lower -c" + wait;
    }
    if (place == "device") { return more + "the device has none left: set place=host" + wait; }
    return more +
        "the host has none left: set far=q4, which takes a quarter, or place=PATH of a file that does not exist yet" +
        wait;
}

bool kvq_far_pool::grow(size_t nb) {
    const size_t least = kvq_pad(nb, NB_ALIGN), left = kvq_pad(nb_most - std::min(total, nb_most), NB_ALIGN);
    size_t size = std::max(least, file >= 0 ? left : std::min(NB_SLAB, left));
    void * memory = nullptr;
    if (file < 0) {
        while (!(memory = more(size)) && size > least) { size = std::max(least, kvq_pad(size / 2, NB_ALIGN)); }
    } else if (!total) { // one slab, so that no end of another is lost: no byte lies behind the file
        memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (memory == MAP_FAILED) { memory = nullptr; }
        if (memory) { madvise(memory, size, MADV_RANDOM); } // rows are fetched one by one
    }
    if (!memory) { return false; }
    why.clear();
    slabs.push_back({ (uint8_t *) memory, size });
    total += size;
    used = 0;
    return true;
}

// Blocks of a lane that follow each other shall lie one behind the other, so that few long copies bring them over a
// bus: a lane gets some at a time, a quarter of what it has.
bool kvq_far_pool::refill(size_t nb, size_t n_most, share & its) {
    constexpr size_t LEAST = 16, NB_MOST = 16u << 20; // at a time: blocks, bytes
    size_t n = std::min(std::max(its.n_held / 4, LEAST), NB_MOST / nb);
    n = std::max(std::min(n, n_most - std::min(n_most, its.n_held)), (size_t) 1);
    std::set<void *> & left = idle[nb];
    uint8_t * first = nullptr;
    if (!left.empty()) {
        first = (uint8_t *) *left.begin();
        size_t i = 0;
        while (i < n && left.erase(first + i * nb)) { i++; }
        n = i;
    } else {
        if (slabs.empty() || used + nb > slabs.back().nb) {
            // every page that waits for memory asks for it in every step
            const auto now = std::chrono::steady_clock::now();
            if (now < ask_again) { return false; }
            if (!grow(nb)) {
                ask_again = now + std::chrono::seconds(1);
                return false;
            }
        }
        n = std::min(n, (slabs.back().nb - used) / nb);
        first = slabs.back().memory + used;
        used += n * nb;
    }
    for (size_t i = 0; i < n; i++) { its.spare.insert(first + i * nb); }
    its.n_held += n;
    return true;
}

void * kvq_far_pool::take(size_t nb, const void * lane, size_t n_most) {
    nb = kvq_pad(nb, KVQ_ALIGN);
    share * from = &shares[{ nb, lane }];
    if (from->spare.empty() && !refill(nb, n_most, *from)) { // what others have not needed yet
        const auto has = [&](const auto & x) { return x.first.first == nb && !x.second.spare.empty(); };
        const auto other = std::find_if(shares.begin(), shares.end(), has);
        if (other == shares.end()) {
            if (why.empty()) { why = lacks(nb); } // one line for blocks of all sizes
            return nullptr;
        }
        from->n_held++;
        other->second.n_held--;
        from = &other->second;
    }
    auto at = from->last ? from->spare.find(from->last + nb) : from->spare.end();
    at = at == from->spare.end() ? from->spare.begin() : at;
    void * p = *at;
    from->last = (uint8_t *) p;
    from->spare.erase(at);
    return p;
}

void kvq_far_pool::give(void * p, size_t nb, const void * lane) {
    nb = kvq_pad(nb, KVQ_ALIGN);
    shares[{ nb, lane }].spare.insert(p);
}

void kvq_far_pool::leave(size_t nb, const void * lane) {
    nb = kvq_pad(nb, KVQ_ALIGN);
    const auto its = shares.find({ nb, lane });
    if (its == shares.end()) { return; }
    idle[nb].insert(its->second.spare.begin(), its->second.spare.end());
    shares.erase(its);
}
