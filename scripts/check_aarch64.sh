#!/bin/sh
# The AArch64 kernels on another machine: cross-compiles types, methods, cache and CPU kernels with tests/native/test_store.cpp and
# scripts/bench_kernels.cpp, and runs both under emulation (attention over random caches against attention over what is read back).
#   scripts/check_aarch64.sh [build folder]        needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu qemu-user)
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root/build-aarch64}
mkdir -p "$out"
cxx="${CXX_AARCH64:-aarch64-linux-gnu-g++} -std=c++17 -O2 -Wall -Wextra -fopenmp -ffp-contract=off -DKVQ_HAVE_NEON=1 -I$root/ggml-kvq -I$root/ggml-kvq/include"
objects=
for file in "$root"/ggml-kvq/types/*.cpp "$root"/ggml-kvq/methods/*.cpp "$root"/ggml-kvq/cache/*.cpp "$root"/ggml-kvq/cpu/*.cpp; do
    name=$(basename "$file" .cpp)
    flags=
    case $name in
        *_avx2 | *_avx512) continue ;;
        *_neon) flags=-march=armv8.2-a+dotprod+fp16 ;;
    esac
    object=$out/$(basename "$(dirname "$file")")-$name.o
    $cxx $flags -c "$file" -o "$object"
    objects="$objects $object"
done
for program in "$root"/tests/native/test_store.cpp "$root"/scripts/bench_kernels.cpp; do
    name=$(basename "$program" .cpp)
    $cxx "$program" $objects -static -pthread -o "$out/$name"
done
qemu-aarch64 "$out/test_store" 1 150
KVQ_ISA=portable qemu-aarch64 "$out/test_store" 1 150
qemu-aarch64 "$out/bench_kernels" --quick affine2 lattice2 f16
