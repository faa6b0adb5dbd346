#!/bin/sh
# The AArch64 kernels on another machine: cross-compiles types and CPU kernels with scripts/bench_kernels.cpp and runs it under
# emulation, which holds scores, values and encoded bytes of every format against the portable kernels, and the means of keys against f64
# (its counts mean nothing there).
#   scripts/check_aarch64.sh [build folder]        needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu qemu-user)
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root/build-aarch64}
mkdir -p "$out"
rm -f "$out"/*.o "$out/libkvq.a"
for file in "$root"/ggml-kvq/*/*.cpp "$root/scripts/bench_kernels.cpp"; do
    case $file in */cache/* | */gguf/* | */host/*) continue ;; esac # these need ggml
    name=$(basename "$(dirname "$file")")-$(basename "$file" .cpp)
    flags=
    case $name in
        *_avx2 | *_avx512) continue ;;
        *_neon) flags=-march=armv8.2-a+dotprod+fp16 ;;
    esac
    ${CXX_AARCH64:-aarch64-linux-gnu-g++} -std=c++17 -O2 -Wall -Wextra -fopenmp -ffp-contract=off -DKVQ_HAVE_NEON=1 \
        -I"$root/ggml-kvq" -I"$root/ggml-kvq/include" $flags -c "$file" -o "$out/$name.o"
done
aarch64-linux-gnu-ar rc "$out/libkvq.a" $(ls "$out"/*.o | grep -v scripts-)
${CXX_AARCH64:-aarch64-linux-gnu-g++} -fopenmp -static "$out/scripts-bench_kernels.o" "$out/libkvq.a" -o "$out/bench_kernels"
qemu-aarch64 "$out/bench_kernels" --quick
qemu-aarch64 "$out/bench_kernels" --quick --head 64 --gqa 1
