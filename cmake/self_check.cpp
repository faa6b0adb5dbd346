// After building, before installing: does llama.cpp's CPU backend multiply right on this CPU?
//
//   self_check FOLDER COMPILER
//
// Every libggml-cpu*.so in FOLDER that this CPU can run multiplies a matrix of each weight type, from each buffer
// type that llama.cpp may keep weights in (plain, repacked, AMX, ...), by one column, by many, and by many that
// choose among experts. Plain loops over the dequantised weights give the product to compare with. The libraries
// run in child processes, so that one that dies is told by name: one line says what went wrong, and the exit code
// is 1.
#include "ggml-backend.h"
#include "ggml.h"

#include <dirent.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int64_t WIDTH = 512, ROWS = 64, EXPERTS = 3, MANY = 19; // AMX takes 32 rows at a time, K-quants 256 channels
constexpr int SECONDS = 600; // then a child counts as hanging; an emulator needs a minute
// Columns hold whole numbers up to 127, and 127 in every block: 8 bits hold them exactly, as do f16 and bf16. What
// is left is rounding of the sums (below 1e-6 of the sum of magnitudes in f32, 5e-4 where a CPU sums in f16). A
// product that lost one block of 32 is 0.01 off in the mean.
constexpr double TOLERANCE = 2e-3;

enum { RIGHT = 0, WRONG = 1, NOT_FOR_THIS_CPU = 2 };

struct report { // what a child does, readable when it is dead
    char doing[160];
    char problem[200];
    int n_types, n_buffers;
};
report * shared;

struct matrix { // [EXPERTS][ROWS][WIDTH]; an ordinary product takes the first expert's
    ggml_type type;
    char weights[EXPERTS * ROWS * WIDTH * sizeof(float)];
    float plain[EXPERTS * ROWS * WIDTH]; // the same, dequantised
};
struct product {
    int64_t experts, columns;
};
struct matrices { // made once; shared with the children
    int n;
    matrix m[GGML_TYPE_COUNT];
};
matrices * all;

void quiet(ggml_log_level, const char *, void *) {}

// Columns of a product: x[n][WIDTH]
std::vector<float> columns(int64_t n) {
    std::mt19937 rng(7);
    std::vector<float> x((size_t) (n * WIDTH));
    for (size_t i = 0; i < x.size(); i++) { x[i] = i % 32 == 5 ? 127.0f : (float) (int) (rng() % 253) - 126.0f; }
    return x;
}

// Any bits are codes of the types of 1 to 3 bits that need tables to quantise (half a minute to make); only the
// scale of a block has to be a number. It stands in the first two bytes, in iq1_m's blocks in pieces, of which the
// last byte has the exponent.
void random_blocks(char * blocks, size_t size, size_t block) {
    std::mt19937 rng(5);
    for (size_t i = 0; i < size; i++) {
        blocks[i] = (char) (rng() & 0xff);
        if (i % block == block - 1) {
            blocks[i] = (char) ((blocks[i] & 0x0f) | 0x20);
        } else if (i % block == 1) {
            blocks[i] = (char) ((blocks[i] & 0x03) | 0x20);
        }
    }
}

[[noreturn]] void make_matrices() {
    std::mt19937 rng(3);
    std::normal_distribution<float> normal;
    constexpr int64_t rows = EXPERTS * ROWS, n = rows * WIDTH;
    std::vector<float> w((size_t) n), importance(WIDTH, 1.0f);
    for (float & f : w) { f = normal(rng); }
    for (int t = 0; t < GGML_TYPE_COUNT; t++) {
        matrix & m = all->m[all->n];
        m.type = (ggml_type) t;
        const ggml_type_traits * traits = ggml_get_type_traits(m.type);
        const bool removed = traits->blck_size <= 0 || traits->type_size == 0 || WIDTH % traits->blck_size;
        if (removed || (m.type != GGML_TYPE_F32 && !traits->to_float)) { // integers have no to_float
            continue;
        }
        snprintf(shared->doing, sizeof shared->doing, "while it quantises to %s", traits->type_name);
        const size_t row = ggml_row_size(m.type, WIDTH);
        if (strncmp(traits->type_name, "iq", 2) == 0 && strncmp(traits->type_name, "iq4", 3) != 0) {
            random_blocks(m.weights, row * rows, traits->type_size);
        } else if (ggml_quantize_chunk(m.type, w.data(), m.weights, 0, rows, WIDTH, importance.data()) != row * rows) {
            continue; // a type of intermediate results
        }
        if (m.type == GGML_TYPE_F32) {
            memcpy(m.plain, w.data(), sizeof m.plain);
        } else {
            traits->to_float(m.weights, m.plain, n);
        }
        if (!std::all_of(m.plain, m.plain + n, [](float f) { return fabsf(f) < 1e3f; })) {
            snprintf(shared->problem, sizeof shared->problem, "weights that are no numbers");
            _exit(WRONG);
        }
        all->n++;
    }
    _exit(RIGHT);
}

void compare(const matrix & m, const std::vector<float> & x, const std::vector<int32_t> & expert,
    const std::vector<float> & got) {
    for (size_t c = 0; c < expert.size(); c++) {
        for (int64_t r = 0; r < ROWS; r++) {
            const float * w = m.plain + (expert[c] * ROWS + r) * WIDTH;
            double want = 0, size = 0;
            for (int64_t i = 0; i < WIDTH; i++) {
                const double term = (double) w[i] * x[c * WIDTH + i];
                want += term;
                size += fabs(term);
            }
            const float have = got[c * ROWS + r];
            if (!(fabs(have - want) <= TOLERANCE * size)) {
                snprintf(shared->problem, sizeof shared->problem, "row %d of column %d is %g instead of %g", (int) r,
                    (int) c, have, want);
                _exit(WRONG);
            }
        }
    }
}

// One product with weights in `buft`; false when the backend does not do it there.
bool multiply(ggml_backend_t backend, ggml_backend_buffer_type_t buft, const matrix & m, const product & p) {
    const int64_t experts = p.experts, n = p.columns;
    ggml_init_params ip = { 8 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, /*no_alloc =*/true };
    ggml_context *wctx = ggml_init(ip), *ctx = ggml_init(ip);
    ggml_tensor * w = ggml_new_tensor_3d(wctx, m.type, WIDTH, ROWS, experts);
    ggml_tensor *x = nullptr, *ids = nullptr, *y = nullptr;
    if (experts > 1) {
        x = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, WIDTH, 1, n);
        ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 1, n);
        y = ggml_mul_mat_id(ctx, w, x, ids);
    } else {
        x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, WIDTH, n);
        y = ggml_mul_mat(ctx, w, x);
    }
    ggml_backend_buffer_t weights = ggml_backend_alloc_ctx_tensors_from_buft(wctx, buft);
    const bool supported = weights && ggml_backend_dev_supports_op(ggml_backend_get_device(backend), y);
    if (supported) {
        ggml_backend_buffer_t rest = ggml_backend_alloc_ctx_tensors(ctx, backend);
        ggml_cgraph * graph = ggml_new_graph(ctx);
        ggml_build_forward_expand(graph, y);
        const std::vector<float> xs = columns(n);
        std::vector<int32_t> expert((size_t) n, 0);
        std::vector<float> got((size_t) (n * ROWS), NAN);
        ggml_backend_tensor_set(w, m.weights, 0, ggml_nbytes(w));
        ggml_backend_tensor_set(x, xs.data(), 0, ggml_nbytes(x));
        if (ids) {
            for (int64_t i = 0; i < n; i++) { expert[i] = (int32_t) (i * 7 % experts); }
            ggml_backend_tensor_set(ids, expert.data(), 0, ggml_nbytes(ids));
        }
        ggml_backend_tensor_set(y, got.data(), 0, ggml_nbytes(y));
        if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
            snprintf(shared->problem, sizeof shared->problem, "the product is refused");
            _exit(WRONG);
        }
        ggml_backend_tensor_get(y, got.data(), 0, ggml_nbytes(y));
        compare(m, xs, expert, got);
        ggml_backend_buffer_free(rest);
    }
    ggml_backend_buffer_free(weights);
    ggml_free(ctx);
    ggml_free(wctx);
    return supported;
}

[[noreturn]] void check_library(const std::string & path) {
    snprintf(shared->doing, sizeof shared->doing, "while it is loaded");
    void * library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(shared->problem, sizeof shared->problem, "%s", dlerror());
        _exit(WRONG);
    }
    auto score = (int (*)()) dlsym(library, "ggml_backend_score");
    auto registry = (ggml_backend_reg_t (*)()) dlsym(library, "ggml_backend_cpu_reg");
    if (score && score() == 0) { _exit(NOT_FOR_THIS_CPU); }
    if (!registry) {
        snprintf(shared->problem, sizeof shared->problem, "it has no ggml_backend_cpu_reg");
        _exit(WRONG);
    }
    ggml_backend_reg_t reg = registry();
    ggml_backend_dev_t dev = ggml_backend_reg_dev_get(reg, 0);
    std::vector<ggml_backend_buffer_type_t> bufts = { ggml_backend_dev_buffer_type(dev) };
    auto function = [reg](const char * name) { return ggml_backend_reg_get_proc_address(reg, name); };
    if (auto extra = (ggml_backend_dev_get_extra_bufts_t) function("ggml_backend_dev_get_extra_bufts")) {
        for (ggml_backend_buffer_type_t * b = extra(dev); b && *b; b++) { bufts.push_back(*b); }
    }
    ggml_backend_t backend = ggml_backend_dev_init(dev, nullptr);
    auto threads = (ggml_backend_set_n_threads_t) function("ggml_backend_set_n_threads");
    std::vector<int> used(bufts.size());
    for (int i = 0; i < all->n; i++) {
        const matrix & m = all->m[i];
        bool done = false;
        for (size_t b = 0; b < bufts.size(); b++) {
            for (const product & p : { product{ 1, 1 }, product{ 1, MANY }, product{ EXPERTS, MANY } }) {
                snprintf(shared->doing, sizeof shared->doing, "in products with %s weights (buffer %s, %d column%s%s)",
                    ggml_type_name(m.type), ggml_backend_buft_name(bufts[b]), (int) p.columns, p.columns > 1 ? "s" : "",
                    p.experts > 1 ? ", experts" : "");
                if (threads) { threads(backend, p.columns > 1 ? 2 : 1); }
                if (multiply(backend, bufts[b], m, p)) {
                    done = true;
                    used[b] = 1;
                }
            }
        }
        shared->n_types += done;
    }
    shared->n_buffers = (int) std::count(used.begin(), used.end(), 1);
    snprintf(shared->doing, sizeof shared->doing, "without one product");
    _exit(shared->n_types > 0 ? RIGHT : WRONG);
}

std::vector<std::string> cpu_libraries(const char * folder) {
    std::vector<std::string> names;
    if (DIR * dir = opendir(folder)) {
        while (const dirent * entry = readdir(dir)) {
            const std::string name = entry->d_name;
            if (name.rfind("libggml-cpu", 0) == 0 && name.find(".so") != std::string::npos && entry->d_type != DT_LNK) {
                names.push_back(name);
            }
        }
        closedir(dir);
    }
    std::sort(names.begin(), names.end());
    return names;
}

void * shared_memory(size_t size) {
    void * p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return p == MAP_FAILED ? nullptr : p;
}

} // namespace

int main(int argc, char ** argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: %s FOLDER COMPILER\n", argv[0]);
        return 2;
    }
    const std::vector<std::string> names = cpu_libraries(argv[1]);
    if (names.empty()) {
        fprintf(
            stderr, "ggml-kvq: self-check: %s holds no libggml-cpu; give the folder of the built libraries\n", argv[1]);
        return 2;
    }
    const auto start = std::chrono::steady_clock::now();
    shared = (report *) shared_memory(sizeof(report));
    all = (matrices *) shared_memory(sizeof(matrices));
    if (!shared || !all) {
        perror("ggml-kvq: self-check");
        return 2;
    }
    ggml_log_set(quiet, nullptr);
    std::string right, skipped;
    report best = {};
    // Nothing of libggml runs in this process: OpenMP's threads do not survive a fork.
    for (size_t i = 0; i <= names.size(); i++) {
        const std::string name = i == 0 ? "libggml-base" : names[i - 1];
        memset(shared, 0, sizeof *shared);
        fflush(nullptr);
        const pid_t child = fork();
        if (child == 0) {
            const rlimit no_core = { 0, 0 };
            setrlimit(RLIMIT_CORE, &no_core);
            setenv("GGML_NO_BACKTRACE", "1", 1);
            if (!freopen("/dev/null", "w", stderr)) { // a failed assertion of ggml prints lines of its own
                _exit(WRONG);
            }
            alarm(SECONDS);
            i == 0 ? make_matrices() : check_library(std::string(argv[1]) + "/" + name);
        }
        int status = 0;
        if (child < 0 || waitpid(child, &status, 0) != child) {
            perror("ggml-kvq: self-check");
            return 2;
        }
        if (WIFEXITED(status) && WEXITSTATUS(status) == NOT_FOR_THIS_CPU) {
            skipped += " " + name;
            continue;
        }
        if (!WIFEXITED(status) || WEXITSTATUS(status) != RIGHT) {
            const char * end = WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : nullptr;
            fprintf(stderr,
                "ggml-kvq: self-check: %s, built by %s, %s%s%s %s%s%s. Cure: another compiler "
                "(CC=clang CXX=clang++ pip install .), or kernels for every CPU (CMAKE_ARGS=-DGGML_NATIVE=OFF); "
                "-DKVQ_SELF_CHECK=OFF in CMAKE_ARGS installs it as it is\n",
                name.c_str(), argv[2], end ? "dies (" : "is wrong", end ? end : "", end ? ")" : "", shared->doing,
                shared->problem[0] ? ": " : "", shared->problem);
            return 1;
        }
        if (i == 0) { continue; }
        best.n_types = std::max(best.n_types, shared->n_types);
        best.n_buffers = std::max(best.n_buffers, shared->n_buffers);
        right += " " + name;
    }
    if (right.empty()) {
        fprintf(stderr, "ggml-kvq: self-check: this CPU can run none of%s; build with CMAKE_ARGS=-DGGML_NATIVE=OFF\n",
            skipped.c_str());
        return 1;
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    printf("ggml-kvq: self-check: %d weight types in %d buffer types multiply right on this CPU (%.1f s):%s%s%s\n",
        best.n_types, best.n_buffers, seconds, right.c_str(),
        skipped.empty() ? "" : "; not for this CPU:", skipped.c_str());
    return 0;
}
