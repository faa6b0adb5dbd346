#!/usr/bin/env bash
# Wheels that need no compiler where they are installed.
#   scripts/build_wheels.sh [--out DIR] [cpu] [aarch64] [cuda] [cuda-full]          default: dist, cpu
#
#   cpu         ggml-kvq: llama.cpp's programs with every variant of its CPU backend, libggml-kvq.so
#   aarch64     the same by aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu)
#   cuda        ggml-kvq-cu13: libggml-kvq.so with CUDA kernels alone, for a llama.cpp that was built with CUDA. Needs
#               nvcc 13 and no cuBLAS: nothing of ours uses it
#   cuda-full   ggml-kvq-full-cu13: with upstream's libggml-cuda.so too, instead of ggml-kvq. Needs nvcc and cuBLAS; at run
#               time both come from the package index (nvidia-cublas, nvidia-cuda-runtime). All cards: most of an hour
# PYTHON=python3.x   ARCHS="80-real 86-real ..."   JOBS=n   KEEP=<folder for the builds: a second run goes on there>
set -euo pipefail
begun=$PWD
cd "$(dirname "$0")/.."
out=dist
kinds=()
while [ $# -gt 0 ]; do
    case $1 in
        --out) [ $# -gt 1 ] || { echo "build_wheels: --out needs a folder" >&2; exit 2; }; out=$(cd "$begun" && realpath -m "$2"); shift ;;
        -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit ;;
        cpu | aarch64 | cuda | cuda-full) kinds+=("$1") ;;
        *) echo "build_wheels: no such wheel: $1 (cpu, aarch64, cuda, cuda-full)" >&2; exit 2 ;;
    esac
    shift
done
[ ${#kinds[@]} -gt 0 ] || kinds=(cpu)
python=${PYTHON:-python3}
archs=${ARCHS:-"80-real 86-real 89-real 90-real 100-real 120"}
export CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-$(nproc)}
mkdir -p "$out"
work=$(mktemp -d "${TMPDIR:-/tmp}/ggml-kvq-wheels.XXXXXX")
trap 'rm -rf "$work"' EXIT
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' python/ggml_kvq/_version.py)

wheel() { # wheel <folder> <pip's arguments>
    mkdir -p "$work/$1"
    "$python" -m pip -q wheel --no-deps -w "$work/$1" ${KEEP:+--config-settings "build-dir=$KEEP/$1"} "${@:2}" .
}

repair() { # repair <folder> <repair_wheel's arguments>
    "$python" scripts/repair_wheel.py "$work/$1"/*.whl -o "$out" "${@:2}" | tee "$work/said"
    made=$(sed 's/\.whl: .*/.whl/' "$work/said")
    if "$python" -m auditwheel --version >/dev/null 2>&1; then
        "$python" -m auditwheel show "$made" | tr '\n' ' ' | sed 's/  */ /g; s/^ */auditwheel: /; s/$/\n/' || true
    fi
}

for kind in "${kinds[@]}"; do
    case $kind in
        cpu)
            CMAKE_ARGS="-DGGML_NATIVE=OFF ${CMAKE_ARGS:-}" wheel cpu
            repair cpu --bundle libgomp.so.1
            ;;
        aarch64)
            # tools of this machine's own: pip would fetch AArch64's for the build, and a virtual environment's do not run in it
            mkdir -p "$work/tools"
            for tool in cmake ninja; do
                own=$(type -ap $tool | while read -r at; do [ "$(head -c 4 "$at" | tail -c 3)" != ELF ] || { echo "$at"; break; }; done)
                [ -n "$own" ] || { echo "build_wheels: aarch64 needs the system's $tool; Debian: apt-get install cmake ninja-build" >&2; exit 2; }
                ln -sf "$own" "$work/tools/$tool"
            done
            PATH=$work/tools:$PATH _PYTHON_HOST_PLATFORM=linux-aarch64 CMAKE_ARGS="-DCMAKE_TOOLCHAIN_FILE=$PWD/cmake/aarch64-linux-gnu.cmake -DGGML_NATIVE=OFF ${CMAKE_ARGS:-}" wheel aarch64
            repair aarch64 --bundle libgomp.so.1
            ;;
        cuda)
            build=${KEEP:-$work}/cuda
            cmake -S . -B "$build" -G Ninja -DGGML_CUDA=ON -DGGML_NATIVE=OFF \
                -DCMAKE_CUDA_ARCHITECTURES="${archs// /;}" -DPython3_EXECUTABLE="$(command -v "$python")" >"$work/log" || { cat "$work/log"; exit 1; }
            cmake --build "$build" --target ggml-kvq
            "$python" scripts/addon_wheel.py "$build/lib/libggml-kvq.so" "$version" "$work/addon"
            repair addon --external libcudart.so.13 --bundle libgomp.so.1
            ;;
        cuda-full)
            wheel cuda-full --config-settings cmake.define.GGML_CUDA=ON --config-settings cmake.define.GGML_NATIVE=OFF \
                --config-settings "cmake.define.CMAKE_CUDA_ARCHITECTURES=${archs// /;}" \
                --config-settings 'cmake.define.CMAKE_SHARED_LINKER_FLAGS=-Wl,-rpath,$ORIGIN/../../nvidia/cu13/lib'
            repair cuda-full --name ggml-kvq-full-cu13 --bundle libgomp.so.1 --requires 'nvidia-cublas>=13,<14' \
                --requires 'nvidia-cuda-runtime>=13,<14' --external libcudart.so.13 --external libcublas.so.13 --external libcuda.so.1
            ;;
    esac
done
ls -l "$out"
