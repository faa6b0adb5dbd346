// KVQ_STATS_FILE: what the caches of this process hold, as JSON, for programs whose own reports cannot be extended
// (llama-server's /props, /slots, /metrics). A thread of its own writes; a reader finds a whole file at any time.
//   caches   those that live. While none does: those that were freed last, each with "freed", seconds since 1970
// Beside the page that llama-server serves lies the same for Prometheus (kv-metrics.txt), of caches that live.
#include "backend.h"
#include "base/settings.h"

#include "ggml-kvq.h"

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <mutex>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

static std::mutex busy_mutex;

// The user's file, and one beside the page that llama-server serves.
static const std::vector<std::string> & stats_paths(void) {
    static const std::vector<std::string> paths = [] {
        std::vector<std::string> out;
        for (const kvq_setting s : { kvq_setting::STATS_FILE, kvq_setting::PAGE_STATS_FILE }) {
            if (*kvq_setting_text(s)) { out.push_back(kvq_setting_text(s)); }
        }
        return out;
    }();
    return paths;
}

kvq_busy::kvq_busy() {
    if (!stats_paths().empty()) { busy_mutex.lock(); }
}
kvq_busy::~kvq_busy() {
    if (!stats_paths().empty()) { busy_mutex.unlock(); }
}

static std::string quoted(const char * text) {
    std::string out = "\"";
    for (const char * c = text; *c; c++) {
        char code[8];
        snprintf(code, sizeof(code), "\\u%04x", (unsigned char) *c);
        if (*c == '"' || *c == '\\') {
            out += std::string("\\") + *c;
        } else {
            out += (unsigned char) *c < 0x20 ? std::string(code) : std::string(1, *c);
        }
    }
    return out + "\"";
}

static std::string number(double x) {
    char text[32];
    snprintf(text, sizeof(text), "%.6g", x);
    return text;
}

// JSON of caches that were freed, since a cache was made; never destroyed, as caches may be freed at exit
static std::vector<std::string> & freed(void) {
    static std::vector<std::string> * const all = new std::vector<std::string>;
    return *all;
}

// freed_at: 0 of one that lives
static std::string cache_json(int i, long long freed_at) {
    kvq_stats s;
    if (kvq_cache_stats(i, &s) != KVQ_OK) { return ""; }
    std::string out = "{";
    const auto add = [&](const char * key, const std::string & value) {
        out += (out.size() > 1 ? ", \"" : "\"") + std::string(key) + "\": " + value;
    };
    add("method", quoted(s.method));
    add("options", quoted(s.options));
    add("kernel", quoted(s.kernel));
    const std::pair<const char *, uint64_t> counts[] = {
        { "layers", (uint64_t) s.n_layer },
        { "tokens", (uint64_t) s.n_cells },
        { "slots", (uint64_t) s.n_stream },
        { "page_tokens", (uint64_t) s.page_cells },
        { "bytes_total", s.bytes_total },
        { "bytes_f16", s.bytes_f16 },
        { "bytes_codes", s.bytes_codes },
        { "bytes_params", s.bytes_params },
        { "bytes_window", s.bytes_window },
        { "bytes_tables", s.bytes_tables },
        { "bytes_calibration", s.bytes_calibration },
        { "bytes_chain", s.bytes_chain },
        { "bytes_scratch", s.bytes_scratch },
        { "bytes_far", s.bytes_far },
        { "cells_fetched", s.n_fetched },
        { "cells_wanted", s.n_wanted },
        { "cells_there_already", s.n_hits },
        { "fetching_steps", s.n_steps },
        { "sealed_pages", s.n_sealed },
        { "reopened_pages", s.n_reopened },
        { "forced_pages", s.n_forced },
    };
    for (const auto & c : counts) { add(c.first, std::to_string(c.second)); }
    const int n = kvq_cache_fetched(i, 0, nullptr, nullptr);
    if (n > 0) {
        std::vector<int32_t> layers((size_t) n);
        std::vector<uint64_t> of((size_t) (4 * n));
        kvq_cache_fetched(i, n, layers.data(), of.data());
        std::string by_layer;
        for (int j = 0; j < n; j++) {
            const std::string key = quoted(std::to_string(layers[(size_t) j]).c_str());
            by_layer += (j ? ", " : "") + key + ": {\"cells_fetched\": " + std::to_string(of[(size_t) (4 * j)]) +
                ", \"cells_wanted\": " + std::to_string(of[(size_t) (4 * j + 1)]) +
                ", \"cells_there_already\": " + std::to_string(of[(size_t) (4 * j + 2)]) + "}";
        }
        add("fetched_by_layer", "{" + by_layer + "}");
    }
    add("bits", number(s.bits));
    add("bits_k", number(s.bits_k));
    add("bits_v", number(s.bits_v));
    add("line", quoted(kvq_cache_line(i)));
    if (freed_at) { add("freed", std::to_string(freed_at)); }
    return out + "}";
}

// Gauges and counters of the caches that live, in Prometheus' text format.
static std::string metrics(void) {
    struct row {
        const char *name, *kind, *help;
        double (*of)(const kvq_stats & s);
    };
    static const row rows[] = {
        { "cache_bytes", "gauge", "memory of the cache, window and tables included",
            [](const kvq_stats & s) { return (double) s.bytes_total; } },
        { "cache_f16_bytes", "gauge", "memory of an f16 cache of as many tokens",
            [](const kvq_stats & s) { return (double) s.bytes_f16; } },
        { "cache_far_bytes", "gauge", "memory of the second tier",
            [](const kvq_stats & s) { return (double) s.bytes_far; } },
        { "cache_bits", "gauge", "true bits a value", [](const kvq_stats & s) { return s.bits; } },
        { "sealed_pages_total", "counter", "pages that were encoded",
            [](const kvq_stats & s) { return (double) s.n_sealed; } },
        { "reopened_pages_total", "counter", "encoded pages that were written again",
            [](const kvq_stats & s) { return (double) s.n_reopened; } },
    };
    std::vector<kvq_stats> all((size_t) std::max(kvq_cache_count(), 0));
    for (size_t i = 0; i < all.size(); i++) {
        if (kvq_cache_stats((int) i, &all[i]) != KVQ_OK) { all[i] = {}; }
    }
    std::string out;
    for (const row & r : rows) {
        const std::string name = std::string("ggml_kvq_") + r.name;
        out += "# HELP " + name + " " + r.help + "\n# TYPE " + name + " " + r.kind + "\n";
        for (size_t i = 0; i < all.size(); i++) {
            char value[32];
            snprintf(value, sizeof(value), "%.17g", r.of(all[i]));
            out += name + "{cache=\"" + std::to_string(i) + "\",method=\"" + all[i].method + "\"} " + value + "\n";
        }
    }
    return out;
}

static std::string metrics_path(void) {
    const std::string page = kvq_setting_text(kvq_setting::PAGE_STATS_FILE);
    return page.empty() ? "" : page.substr(0, page.rfind('/') + 1) + "kv-metrics.txt";
}

static void write_whole(const std::string & path, const std::string & text) {
    const std::string partial = path + "." + std::to_string(getpid()) + ".part";
    // A rename would put a file in the place of a device or a pipe.
    struct stat there;
    const bool other = stat(path.c_str(), &there) == 0 && !S_ISREG(there.st_mode);
    FILE * f = other ? nullptr : fopen(partial.c_str(), "w");
    const bool ok = f && fwrite(text.data(), 1, text.size(), f) == text.size();
    if (!(f && fclose(f) == 0 && ok && rename(partial.c_str(), path.c_str()) == 0)) {
        remove(partial.c_str());
        static bool said = false;
        if (!said) {
            said = true;
            const char * cure = !other   ? ": check its folder and the disk"
                : S_ISDIR(there.st_mode) ? ": it is a folder, name a file in it"
                                         : ": it is a device or a pipe, name a file";
            kvq_report_note("the figures of the cache cannot be written to " + path + cure);
        }
    }
}

void kvq_stats_file_freeing(const kvq_kv_cache & cache) {
    if (stats_paths().empty()) { return; }
    const kvq_busy busy;
    const std::string json = cache_json(kvq_kv_cache::number_of(&cache), (long long) time(nullptr));
    if (!json.empty()) { freed().push_back(json); }
}

void kvq_stats_file_write(void) {
    if (stats_paths().empty()) { return; }
    const kvq_busy busy;
    std::vector<std::string> all;
    for (int i = 0; i < kvq_cache_count(); i++) { all.push_back(cache_json(i, 0)); }
    if (all.empty()) { all = freed(); }
    std::string caches;
    for (const std::string & json : all) { caches += (caches.empty() ? "\n  " : ",\n  ") + json; }
    const std::string text = "{\"version\": 1, \"pid\": " + std::to_string(getpid()) +
        ", \"time\": " + std::to_string((long long) time(nullptr)) + ", \"caches\": [" + caches + "\n]}\n";
    for (const std::string & path : stats_paths()) { write_whole(path, text); }
    if (!metrics_path().empty()) { write_whole(metrics_path(), metrics()); }
}

// The folder that the launcher made for this server's page: index.html and the figures twice,
// ".../ggml-kvq-page-<user>-<process>". A router's children inherit the variable and leave it alone.
static void remove_page(void) {
    const std::string path = kvq_setting_text(kvq_setting::PAGE_STATS_FILE);
    const std::string folder = path.substr(0, path.rfind('/')), mine = "-" + std::to_string(getpid());
    if (path.empty() || folder.size() < mine.size() || folder.compare(folder.size() - mine.size(), mine.size(), mine)) {
        return;
    }
    remove(path.c_str());
    remove(metrics_path().c_str());
    remove((folder + "/index.html").c_str());
    rmdir(folder.c_str());
}

// Runs when the loader unloads libraries, behind the writer. A server whose port is taken ends before it has a cache.
__attribute__((destructor)) static void end(void) { remove_page(); }

namespace {
struct writer {
    std::mutex mutex;
    std::condition_variable wake;
    bool stop = false;
    std::thread thread{ [this] {
        std::unique_lock<std::mutex> lock(mutex);
        do { kvq_stats_file_write(); } while (!wake.wait_for(lock, std::chrono::seconds(2), [this] { return stop; }));
    } };
    ~writer() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            stop = true;
        }
        wake.notify_all();
        thread.join();
    }
};
}

void kvq_stats_file_start(void) {
    if (stats_paths().empty()) { return; }
    {
        const kvq_busy busy;
        freed().clear();
    }
    static writer w;        // joined at exit, before the list of caches goes
    kvq_stats_file_write(); // of a second cache, too: the thread comes two seconds later
}
