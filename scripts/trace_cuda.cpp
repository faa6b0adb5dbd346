// Where a step on a GPU goes: which kernels and copies, when. CUDA loads this into a program that it starts.
//
//   g++ -std=c++17 -O2 -fPIC -shared scripts/trace_cuda.cpp -I$CUDA/include -L$CUDA/lib64 -lcupti -o trace_cuda.so
//   CUDA_INJECTION64_PATH=$PWD/trace_cuda.so TRACE_CUDA=out.csv build/bench_depth MODEL KVQ0 8192 16
//   scripts/trace_cuda.py out.csv
//
// A line: start in ns, end in ns, blocks, bytes of a copy, name. Kernels of a recorded graph are traced one by one,
// which slows the step; trace_cuda.py compares traces, not tokens per second.
#include <cupti.h>
#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <unordered_map>

static FILE * out = nullptr;
static std::mutex writing;
static std::unordered_map<const char *, std::string> names; // by the name that CUPTI keeps

static const std::string & readable(const char * name) {
    std::string & x = names[name];
    if (x.empty()) {
        int status = 0;
        char * text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
        x = status == 0 ? text : name;
        free(text);
    }
    return x;
}

static void CUPTIAPI give(uint8_t ** buffer, size_t * size, size_t * n_records) {
    *size = 8 << 20;
    *buffer = (uint8_t *) aligned_alloc(8, *size);
    *n_records = 0;
}

static void CUPTIAPI take(CUcontext, uint32_t, uint8_t * buffer, size_t, size_t valid) {
    std::lock_guard<std::mutex> lock(writing);
    CUpti_Activity * r = nullptr;
    while (cuptiActivityGetNextRecord(buffer, valid, &r) == CUPTI_SUCCESS) {
        if (r->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
            const auto & k = *(const CUpti_ActivityKernel10 *) r;
            fprintf(out, "%llu,%llu,%d,0,%s\n", (unsigned long long) k.start, (unsigned long long) k.end,
                k.gridX * k.gridY * k.gridZ, readable(k.name).c_str());
        } else if (r->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
            const auto & c = *(const CUpti_ActivityMemcpy6 *) r;
            const char * kind = c.copyKind == CUPTI_ACTIVITY_MEMCPY_KIND_HTOD ? "copy to device"
                : c.copyKind == CUPTI_ACTIVITY_MEMCPY_KIND_DTOH               ? "copy to host"
                                                                              : "copy";
            fprintf(out, "%llu,%llu,0,%llu,%s\n", (unsigned long long) c.start, (unsigned long long) c.end,
                (unsigned long long) c.bytes, kind);
        } else if (r->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
            const auto & c = *(const CUpti_ActivityMemset4 *) r;
            fprintf(out, "%llu,%llu,0,%llu,set\n", (unsigned long long) c.start, (unsigned long long) c.end,
                (unsigned long long) c.bytes);
        }
    }
    free(buffer);
}

static void finish() {
    cuptiActivityFlushAll(1);
    std::lock_guard<std::mutex> lock(writing);
    fclose(out);
}

extern "C" int InitializeInjection() {
    const char * path = getenv("TRACE_CUDA");
    out = fopen(path ? path : "trace_cuda.csv", "w");
    if (!out) {
        fprintf(stderr, "trace_cuda: cannot write %s; set TRACE_CUDA to a file\n", path ? path : "trace_cuda.csv");
        return 1;
    }
    for (const CUpti_ActivityKind kind :
        { CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET }) {
        if (cuptiActivityEnable(kind) != CUPTI_SUCCESS) {
            fprintf(stderr, "trace_cuda: CUPTI does not trace this device\n");
            return 1;
        }
    }
    cuptiActivityRegisterCallbacks(give, take);
    atexit(finish);
    return 1;
}
