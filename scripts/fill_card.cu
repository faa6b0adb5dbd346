// Takes all but MIB of what is free on a GPU, says so, and keeps it for SECONDS: what does a full card do?
//   nvcc scripts/fill_card.cu -o fill_card && ./fill_card MIB SECONDS
#include <cstdio>
#include <cstdlib>
#include <unistd.h>

int main(int argc, char ** argv) {
    if (argc < 3) { return fprintf(stderr, "usage: fill_card MIB SECONDS\n"), 2; }
    size_t free = 0, total = 0;
    const size_t keep = (size_t) atoll(argv[1]) << 20;
    void * p = nullptr;
    cudaFree(nullptr);
    if (cudaMemGetInfo(&free, &total) != cudaSuccess || free <= keep || cudaMalloc(&p, free - keep) != cudaSuccess) {
        return fprintf(stderr, "fill_card: %zu MiB are free, and all but %s cannot be taken\n", free >> 20, argv[1]), 1;
    }
    printf("%zu MiB taken, %s are free\n", (free - keep) >> 20, argv[1]);
    fflush(stdout);
    sleep((unsigned) atoi(argv[2]));
    return 0;
}
