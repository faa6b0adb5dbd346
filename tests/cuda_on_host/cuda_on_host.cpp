#include "include/cuda_fp16.h"
#include "base/f16.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <vector>

#include <csetjmp>
#include <sys/mman.h>
#include <ucontext.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#if defined(__F16C__)
float host_half_to_float(uint16_t h) { return _cvtsh_ss(h); }
uint16_t host_float_to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
#else
float host_half_to_float(uint16_t h) { return kvq_f16_to_f32(h); }
uint16_t host_float_to_half(float x) { return kvq_f32_to_f16(x); }
#endif

dim3 threadIdx, blockIdx, gridDim, blockDim;

namespace host_cuda {

uint8_t * shared;
uint64_t n_blocks;

namespace {

constexpr size_t STACK = 256 << 10;

struct thread {
    unsigned n_ops = 0; // warp operations begun
    ucontext_t start;   // the first time; later turns jump, which needs no system call
    jmp_buf here;
    std::unique_ptr<uint8_t[]> stack{ new uint8_t[STACK] };
    bool done = false, begun = false; // begun: its stack lives; a block after the first goes on behind the last kernel
};
constexpr int REGISTERS = 6; // that a lane gives to a product
struct warp {
    // by the parity of the operation
    uint64_t value[2][32];
    uint32_t registers[2][32][REGISTERS];
    unsigned n_lanes, n_done, n_arrived;
    unsigned n_complete; // operations that every lane began that has not returned
};

jmp_buf scheduler;
thread * now;
std::vector<std::unique_ptr<thread>> threads;
std::vector<warp> warps;
unsigned n_threads, n_arrived, n_barriers, n_done;
uint64_t n_events; // whatever brings a thread on
struct {
    unsigned n_arrived, n_passed;
} teams[16];
int count_now, count_before; // threads of this block whose value is true
const std::function<void()> * kernel;

void yield() {
    if (!_setjmp(now->here)) { _longjmp(scheduler, 1); }
}

void resume(thread & t) {
    now = &t;
    if (!_setjmp(scheduler)) {
        if (t.begun) { _longjmp(t.here, 1); }
        t.begun = true;
        setcontext(&t.start);
    }
}

// Every lane of the warp that has not returned has begun the next operation: it is complete. Who has returned gives 0.
void complete(unsigned w) {
    warp & x = warps[w];
    if (!x.n_arrived || x.n_arrived + x.n_done < x.n_lanes) { return; }
    x.n_arrived = 0;
    x.n_complete++;
    for (unsigned i = 0; x.n_done && i < x.n_lanes; i++) {
        if (!threads[32 * w + i]->done) { continue; }
        x.value[x.n_complete % 2][i] = 0;
        memset(x.registers[x.n_complete % 2][i], 0, sizeof(x.registers[0][i]));
    }
}

void body() {
    for (;;) {
        (*kernel)();
        now->done = true;
        n_done++;
        n_events++;
        const unsigned w = threadIdx.x / 32;
        warps[w].n_done++;
        complete(w);
        yield();
    }
}

void release_barrier() { // everybody has come, or returned
    if (n_arrived && n_arrived + n_done == n_threads) {
        n_arrived = 0;
        count_before = count_now;
        count_now = 0;
        n_barriers++;
        n_events++;
    }
}

void run_block() {
    memset(shared, 0xa5, SHARED_BYTES);
    warps.assign((n_threads + 31) / 32, warp());
    n_arrived = n_done = n_barriers = 0;
    count_now = count_before = 0;
    for (auto & t : teams) { t = {}; }
    for (unsigned i = 0; i < n_threads; i++) {
        thread & t = *threads[i];
        warps[i / 32].n_lanes++;
        t.n_ops = 0;
        t.done = false;
        if (t.begun) { continue; }
        getcontext(&t.start);
        t.start.uc_stack.ss_sp = t.stack.get();
        t.start.uc_stack.ss_size = STACK;
        t.start.uc_link = nullptr;
        makecontext(&t.start, body, 0);
    }
    for (int idle = 0; n_done < n_threads;) {
        const uint64_t before = n_events;
        for (unsigned i = 0; i < n_threads; i++) {
            if (!threads[i]->done) {
                threadIdx = dim3(i, 0, 0);
                resume(*threads[i]);
            }
        }
        release_barrier();
        idle = n_events == before ? idle + 1 : 0;
        if (idle > 3) {
            fprintf(stderr, "block %u,%u,%u: threads wait for one another: some never come to a collective\n",
                blockIdx.x, blockIdx.y, blockIdx.z);
            abort();
        }
    }
}

} // namespace

const uint64_t * exchange(uint64_t mine) {
    const unsigned id = threadIdx.x, w = id / 32, n = ++now->n_ops;
    warp & x = warps[w];
    uint64_t * values = x.value[n % 2];
    values[id % 32] = mine;
    x.n_arrived++;
    n_events++;
    complete(w);
    while (x.n_complete < n) { yield(); }
    return values;
}

int block_count(bool x) {
    const unsigned before = n_barriers;
    n_arrived++;
    n_events++;
    count_now += x;
    release_barrier();
    while (n_barriers == before) { yield(); }
    return count_before;
}

void block_barrier() { block_count(false); }

void team_barrier(int id, int n) {
    auto & t = teams[id];
    const unsigned before = t.n_passed;
    n_events++;
    if (++t.n_arrived == (unsigned) n) {
        t.n_arrived = 0;
        t.n_passed++;
    }
    while (t.n_passed == before) { yield(); }
}

void launch(dim3 g, dim3 b, size_t nb_shared, const std::function<void()> & k) {
    cudaDeviceProp p;
    cudaGetDeviceProperties(&p, 0);
    // of the smallest cards that can be asked for
    static const size_t most = getenv("KVQ_CUDA_AS") ? (99 << 10) : p.sharedMemPerBlockOptin;
    if (nb_shared > most || b.y != 1 || b.z != 1) {
        fprintf(stderr, "a launch of %zu shared bytes where there are %zu, %u x %u x %u threads\n", nb_shared, most,
            b.x, b.y, b.z);
        abort();
    }
    static std::vector<uint8_t> memory(SHARED_BYTES + 1024);
    shared = memory.data() + (1024 - (uintptr_t) memory.data() % 1024);
    gridDim = g;
    blockDim = b;
    kernel = &k;
    n_threads = b.x;
    while (threads.size() < n_threads) { threads.emplace_back(new thread); }
    for (unsigned z = 0; z < g.z; z++) {
        for (unsigned y = 0; y < g.y; y++) {
            for (unsigned x = 0; x < g.x; x++) {
                blockIdx = dim3(x, y, z);
                n_blocks++;
                memset(shared, 0xff, nb_shared);
                run_block();
            }
        }
    }
}

// ---------------------------------------------------------------- device memory

static constexpr size_t ARENA = (size_t) 64 << 30, ALIGNED = 256;
static uint8_t * arena;
static size_t arena_used;
static std::map<const uint8_t *, size_t> given;       // bytes
static std::multimap<size_t, uint8_t *> free_of_size; // memory that came back

void * device_alloc(size_t nb) {
    if (!arena) {
        void * all = mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (all == MAP_FAILED) { return nullptr; }
        arena = (uint8_t *) all;
    }
    nb = std::max<size_t>((nb + ALIGNED - 1) / ALIGNED * ALIGNED, ALIGNED);
    uint8_t * p = arena + arena_used;
    const auto found = free_of_size.find(nb);
    if (found != free_of_size.end()) {
        p = found->second;
        free_of_size.erase(found);
    } else if (nb > ARENA - arena_used) {
        return nullptr;
    } else {
        arena_used += nb;
    }
    given[p] = nb;
    return p;
}

void device_free(void * p) {
    const auto at = given.find((const uint8_t *) p);
    if (at == given.end()) { return; }
    const size_t nb = at->second, whole = 4096; // the system has its pages back
    uint8_t *const begin = (uint8_t *) (((uintptr_t) p + whole - 1) / whole * whole),
                   *const end = (uint8_t *) (((uintptr_t) p + nb) / whole * whole);
    if (begin < end) { madvise(begin, (size_t) (end - begin), MADV_DONTNEED); }
    free_of_size.emplace(nb, (uint8_t *) p);
    given.erase(at);
}

bool may_copy(const void * at, size_t nb) {
    const auto * const p = (const uint8_t *) at;
    if (!arena || p < arena || p >= arena + arena_used) { return true; } // the host's
    auto block = given.upper_bound(p);
    if (block == given.begin()) { return false; }
    --block;
    return p + nb <= block->first + block->second;
}

// What every lane gave, as exchange(): up to REGISTERS at once.
static const uint32_t (*exchange_registers(const uint32_t * mine, int n)) [REGISTERS] {
    warp & w = warps[threadIdx.x / 32];
    uint32_t (*all)[REGISTERS] = w.registers[(now->n_ops + 1) % 2];
    for (int r = 0; r < n; r++) { all[threadIdx.x % 32][r] = mine[r]; }
    exchange(0);
    return all;
}

} // namespace host_cuda

// ---------------------------------------------------------------- warp-wide products, operands as PTX lays them out

namespace {

// what lane `i` gave: x[i][register]
struct registers {
    const uint32_t (*x)[host_cuda::REGISTERS];
    registers(const uint32_t * mine, int n) : x(host_cuda::exchange_registers(mine, n)) {}
};

float half_of(uint32_t x, int i) { return host_half_to_float((uint16_t) (x >> 16 * i)); }
int byte_of(uint32_t x, int i) { return (int8_t) (x >> 8 * i); }

} // namespace

// m16n8k16: a (16 x 16) rows g, g + 8 of lanes 4g + c, columns 2c, 2c + 1 and 8 further; b (16 x 8) column g; d rows
// g, g + 8, columns 2c, 2c + 1
void host_mma_f16(float & d0, float & d1, float & d2, float & d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
    uint32_t b0, uint32_t b1) {
    const uint32_t mine[6] = { a0, a1, a2, a3, b0, b1 };
    const registers r(mine, 6);
    const int lane = (int) (threadIdx.x % 32), g = lane / 4, c = lane % 4;
    float * d[4] = { &d0, &d1, &d2, &d3 };
    for (int e = 0; e < 4; e++) {
        const int row = e / 2, column = 2 * c + e % 2;
        double sum = *d[e];
        for (int k = 0; k < 16; k++) {
            const float x = half_of(r.x[4 * g + k % 8 / 2][row + k / 8 * 2], k % 2),
                        y = half_of(r.x[4 * column + k % 8 / 2][4 + k / 8], k % 2);
            sum += (double) x * y;
        }
        *d[e] = (float) sum;
    }
}

// m16n8k32: four bytes a register; of_b: a byte of the right operand
template <typename F>
static void mma_bytes(int * const (&d)[4], const uint32_t (&mine)[6], const int (&before)[4], F && of_b) {
    const registers r(mine, 6);
    const int lane = (int) (threadIdx.x % 32), g = lane / 4, c = lane % 4;
    for (int e = 0; e < 4; e++) {
        const int row = e / 2, column = 2 * c + e % 2;
        int sum = before[e];
        for (int k = 0; k < 32; k++) {
            sum += byte_of(r.x[4 * g + k % 16 / 4][row + k / 16 * 2], k % 4) *
                of_b(r.x[4 * column + k % 16 / 4][4 + k / 16], k % 4);
        }
        *d[e] = sum;
    }
}

void host_mma_s8(int & d0, int & d1, int & d2, int & d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
    uint32_t b0, uint32_t b1, int c0, int c1, int c2, int c3) {
    mma_bytes({ &d0, &d1, &d2, &d3 }, { a0, a1, a2, a3, b0, b1 }, { c0, c1, c2, c3 }, byte_of);
}

void host_mma_s8_u8(int & d0, int & d1, int & d2, int & d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
    uint32_t b0, uint32_t b1) {
    mma_bytes({ &d0, &d1, &d2, &d3 }, { a0, a1, a2, a3, b0, b1 }, { d0, d1, d2, d3 },
        [](uint32_t x, int i) { return (int) (x >> 8 * i & 255); });
}

// x4: rows of matrix m are where lanes 8m .. 8m + 7 point; a lane gets elements 2c, 2c + 1 of row g of each
void host_ldmatrix(uint32_t & x0, uint32_t & x1, uint32_t & x2, uint32_t & x3, uint32_t at) {
    const registers r(&at, 1);
    const int lane = (int) (threadIdx.x % 32), g = lane / 4, c = lane % 4;
    uint32_t * x[4] = { &x0, &x1, &x2, &x3 };
    for (int m = 0; m < 4; m++) { memcpy(x[m], host_cuda::shared + r.x[8 * m + g][0] + 4 * c, 4); }
}

// the same, and a lane gets elements g of rows 2c, 2c + 1 of each
void host_ldmatrix_trans(uint32_t & x0, uint32_t & x1, uint32_t & x2, uint32_t & x3, uint32_t at) {
    const registers r(&at, 1);
    const int lane = (int) (threadIdx.x % 32), g = lane / 4, c = lane % 4;
    uint32_t * x[4] = { &x0, &x1, &x2, &x3 };
    for (int m = 0; m < 4; m++) {
        uint16_t low, high;
        memcpy(&low, host_cuda::shared + r.x[8 * m + 2 * c][0] + 2 * g, 2);
        memcpy(&high, host_cuda::shared + r.x[8 * m + 2 * c + 1][0] + 2 * g, 2);
        *x[m] = low | (uint32_t) high << 16;
    }
}

uint32_t host_movmatrix(uint32_t x) {
    const registers r(&x, 1);
    const int lane = (int) (threadIdx.x % 32), g = lane / 4, c = lane % 4;
    const auto element = [&](int row, int column) {
        return r.x[4 * row + column / 2][0] >> 16 * (column % 2) & 0xffff;
    };
    return element(2 * c, g) | element(2 * c + 1, g) << 16;
}
