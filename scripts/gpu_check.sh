#!/bin/bash
# One call on a machine with an NVIDIA GPU: builds with CUDA, compares kernels with the C reference and whole programs with
# upstream's own CUDA backend, then times both.
#   scripts/gpu_check.sh MODEL.gguf TEXT [BUILD_DIR]      LLAMA_CPP_DIR=<source> (default: the pinned one)
#   PROGRAMS=<folder>: upstream's programs and libraries, built with CUDA before; default: they are built here
#   PARTS="kernels programs bench"                        what to run, also: quality, archs (every architecture, tests/arch_matrix.py), walks (random
#                                                         operations, with pytest), place (blocks in the host's memory, a full card); JOBS=<n> compilers at once; ARCH=native|90|...
#   KVQ_CONFIG=<sidecar of the model>                     aqua's predictors too
#   SANITIZER="memcheck racecheck"                        kernel tests once more under these tools of compute-sanitizer
set -uo pipefail
cd "$(dirname "$0")/.."
model=$1 text=$2 build=${3:-build-cuda}
jobs=${JOBS:-$(nproc)} arch=${ARCH:-native} parts=${PARTS:-kernels programs bench}
export CUDACXX=${CUDACXX:-nvcc}
mkdir -p "$build/kernels"

has() { [[ " $parts " == *" $1 "* ]]; }

if has programs || has bench || has quality || has archs || has walks || has place; then
    whole=ON; [ -n "${PROGRAMS:-}" ] && whole=OFF
    (cmake -S . -B "$build" -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="$arch" -DKVQ_BUILD_PROGRAMS=$whole ${LLAMA_CPP_DIR:+-DLLAMA_CPP_DIR=$LLAMA_CPP_DIR} &&
        CMAKE_BUILD_PARALLEL_LEVEL=$jobs cmake --build "$build" -j "$jobs" && { [ $whole = ON ] || cp -f "$PROGRAMS"/* "$build/lib/"; }) > "$build/build.log" 2>&1 &
    builder=$!
fi

failed=0
if has kernels; then
    cd "$build/kernels"
    root=../..; [[ $build = /* ]] && root=$OLDPWD
    flags="-std=c++17 -O3 -I$root/ggml-kvq -I$root/ggml-kvq/include"
    rm -f ./*.o # some may be of files that are gone
    cmake -DOUT=instances -P "$root/cmake/cuda_instances.cmake" || exit 1
    exact=-ffp-contract=off # every operation rounds, as in the numpy definition
    {
        for f in "$root"/ggml-kvq/{types,engine,store,policy,methods,cpu}/*.cpp; do
            extra=
            case $f in
                *_avx2.cpp)   extra="-mavx2 -mfma -mf16c" ;;
                *_avx512.cpp) extra="-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mfma -mf16c" ;;
            esac
            echo "g++ $flags $exact -fopenmp $extra -c $f -o $(basename "$(dirname "$f")")_$(basename "$f").o"
        done
        for f in "$root"/ggml-kvq/cuda/{,*/}*.cu instances/*.cu; do
            extra=
            [[ $f = */cuda/seal/* ]] && extra=-fmad=false
            echo "$CUDACXX $flags -arch=sm_${arch#sm_} $extra -c $f -o $(basename "$f").o"
        done
        echo "$CUDACXX $flags -arch=sm_${arch#sm_} -c $root/tests/native/cuda_cold.cu -o cuda_cold.main"
        for f in "$root"/tests/native/test_cuda*.cpp; do
            echo "g++ $flags -c $f -o $(basename "$f" .cpp).main"
        done
    } | xargs -P "$jobs" -d '\n' -n 1 sh -c || failed=1
    for f in test_cuda*.main; do
        "$CUDACXX" -arch="sm_${arch#sm_}" -Xcompiler -fopenmp ./*.o -Xlinker "$f" -Xlinker cuda_cold.main -o "${f%.main}" || failed=1
    done
    echo "== kernels against the C reference"
    timeout 250 ./test_cuda || failed=1
    timeout 250 ./test_cuda_policies || failed=1
    if [ -n "${SANITIZER:-}" ]; then
        for tool in $SANITIZER; do
            echo "== compute-sanitizer $tool"
            for program in test_cuda test_cuda_policies; do
                timeout 300 compute-sanitizer --tool "$tool" --error-exitcode 9 ./$program quick 2>&1 | tail -3
                [ "${PIPESTATUS[0]}" = 0 ] || failed=1
            done
        done
    fi
    echo "== one layer's attention"
    timeout 100 ./test_cuda bench || failed=1
    timeout 100 ./test_cuda_policies bench || failed=1
    cd "$OLDPWD"
fi

if has programs || has bench || has quality || has archs || has walks || has place; then
    wait "$builder" || { tail -30 "$build/build.log"; exit 1; }
    lib=$(cd "$build/lib" && pwd)
    export LD_LIBRARY_PATH=$lib
    kvq() { GGML_BACKEND_PATH=$lib/libggml-kvq.so KVQ_METHOD=$1 KVQ_OPTS=$2 KVQ_MODEL=$model "$lib/$3" -m "$model" -dev KVQ0 -ngl 99 "${@:4}"; }
    upstream() { "$lib/$1" -m "$model" -dev CUDA0 -ngl 99 "${@:2}"; }
    llama=${LLAMA_CPP_DIR:-$(sed -n 's/^LLAMA_CPP_DIR:PATH=//p' "$build/CMakeCache.txt")}
fi
if has archs; then
    echo "== architectures: each method on the device against upstream's own cache on it"
    LLAMA_CPP_DIR=$llama python3 tests/arch_matrix.py --lib "$lib" --reference CUDA0 --jobs 4 --check > "$build/archs.log" 2>&1 || failed=1
    grep -E "<-|worst|architectures in|rror" "$build/archs.log" | cut -c1-200
    LLAMA_CPP_DIR=$llama python3 tests/arch_matrix.py --lib "$lib" --reference CUDA0 --jobs 4 --check --image --arch 'qwen2vl|qwen3vl|glm4|paddleocr' | grep -E "<-|worst" || failed=1
fi
if has programs; then
    echo "== perplexity: upstream f16, then each method on the device"
    ppl() { grep -E "Final estimate|ggml-kvq|error|Mean PPL|Mean +KLD|Same top p:" | cut -c1-160; }
    upstream llama-perplexity -f "$text" -c 1024 -b 512 --chunks 12 -fa on --kl-divergence-base "$build/base.kld" 2>&1 | ppl
    for m in "f16:" "kivi:bits=2" "kivi:bits=2,group=128,scales=u8" "kivi:bits=4" "xquant:" "higgs:bits=2" "higgs:bits=4" "zipcache:" "minikv:" "aqua:predictor=none" ${KVQ_CONFIG:+aqua:predictor=bias aqua:predictor=full}; do
        kvq "${m%%:*}" "${m#*:}" llama-perplexity -f "$text" -c 1024 -b 512 --chunks 12 -fa on --kl-divergence --kl-divergence-base "$build/base.kld" 2>&1 | ppl
        [ "${PIPESTATUS[0]}" = 0 ] || failed=1
    done
    echo "== text"
    upstream llama-completion -p "The register file holds" -n 48 --temp 0 -fa on -no-cnv 2>/dev/null | tr '\n' ' '; echo
    for m in "f16:" "kivi:bits=4" "higgs:bits=4"; do
        kvq "${m%%:*}" "${m#*:}" llama-completion -p "The register file holds" -n 48 --temp 0 -fa on -no-cnv 2>"$build/text.log" | tr '\n' ' ' || failed=1
        echo
        grep -E "error|KV buffer|compute buffer|graph splits" "$build/text.log" | cut -c1-160
    done
fi
if has place; then
    echo "== sealed blocks in the host's memory: perplexity as on the device, and a card that is full"
    final() { kvq "$1" "$2" llama-perplexity -f "$text" -c 2048 -b 512 -ub 128 --chunks 2 -fa on > "$build/place.log" 2>&1; grep -oE "Final estimate: PPL = [0-9.]+" "$build/place.log"; }
    for m in kivi: higgs: xquant: zipcache: minikv: aqua:predictor=none auto:bits=2.25; do
        opts=${m#*:}
        there=$(final "${m%%:*}" "$opts") host=$(final "${m%%:*}" "${opts:+$opts,}place=host")
        echo "$m $there | $host"
        [ -n "$there" ] && [ "$there" = "$host" ] && grep -q "lie in the host's memory" "$build/place.log" || failed=1
    done
    "$CUDACXX" scripts/fill_card.cu -o "$build/fill_card" || failed=1
    need=$(($(stat -c %s "$model") / 1048576 + 1700)) # weights, graphs and the CUDA context; 1 GiB of it place=auto leaves free
    coproc CARD { "$build/fill_card" $need 60; }
    read -r -t 30 line <&"${CARD[0]}" && echo "$line" || failed=1
    kvq kivi place=auto llama-completion -p "The register file holds" -n 48 --temp 0 -fa on -fit off -no-cnv -c 131072 2>&1 > /dev/null | grep -oE "blocks of [0-9]+ layers? lie in the host's memory[^;]*" || failed=1
    kill "$CARD_PID"
fi
if has walks; then
    echo "== random operations on our cache and on upstream's, which are on the same device"
    export KVQ_LIB_DIR=$lib PYTHONPATH=python
    python3 -m pytest -q -n0 tests/test_llama_features.py -k "walk_follows and not lab" || failed=1
    echo "== damaged states: nothing is computed on them, recorded steps neither"
    python3 -m pytest -q -n0 tests/test_states.py tests/test_declared.py tests/test_minikv.py -k "damaged_state_set or changed_byte or stand_alone or minikv" || failed=1
fi
if has quality; then
    # The same programs twice, once with the GPU hidden: KVQ0 is then the CPU. Each against its own upstream f16, whose weights it shares.
    echo "== KL divergence from upstream's f16 cache, on the GPU and on the CPU"
    printf '%-34s %12s %12s %8s\n' cache GPU CPU ratio
    run=(llama-perplexity -f "$text" -c 1024 -b 512 --chunks "${CHUNKS:-12}" -fa on --kl-divergence-base)
    kld() { grep -oE "Mean +KLD: +[0-9.e+-]+" | grep -oE "[0-9.e+-]+$"; }
    upstream "${run[0]}" "${run[@]:1}" "$build/base.gpu.kld" > /dev/null 2>&1 || failed=1
    CUDA_VISIBLE_DEVICES= "$lib/llama-perplexity" -m "$model" -ngl 0 -t "$jobs" "${run[@]:1}" "$build/base.cpu.kld" > /dev/null 2>&1 || failed=1
    for m in ${METHODS:-f16: kivi:bits=2 kivi:bits=2,group=128,scales=u8 kivi:bits=4 xquant: higgs:bits=2 higgs:bits=4 zipcache: minikv: specache:prompt=near auto:bits=2.25,at=131072 aqua:predictor=none ${KVQ_CONFIG:+aqua:predictor=bias aqua:predictor=k aqua:predictor=full}}; do
        gpu=$(kvq "${m%%:*}" "${m#*:}" "${run[@]}" "$build/base.gpu.kld" --kl-divergence 2>&1 | kld)
        cpu=$(CUDA_VISIBLE_DEVICES= kvq "${m%%:*}" "${m#*:}" "${run[@]}" "$build/base.cpu.kld" --kl-divergence -t "$jobs" 2>&1 | kld)
        # f16 and others that lose next to nothing are held to 1e-4, what arithmetic alone makes
        awk -v m="$m" -v g="$gpu" -v c="$cpu" 'BEGIN { printf("%-34s %12s %12s %8.3f\n", m, g, c, (c + 0 > 0 ? g / c : 0)); d = g - c; d = d < 0 ? -d : d; exit !(g != "" && c != "" && (d <= 0.05 * c || d <= 1e-4)) }' || { echo "    differs by more than 5 %"; failed=1; }
    done
fi
if has bench; then
    echo "== speed"
    g++ -std=c++17 -O2 -I"$llama/include" -I"$llama/ggml/include" scripts/bench_depth.cpp "$lib"/lib{llama,ggml,ggml-base,ggml-cpu,ggml-cuda}.so.0 -o "$build/bench_depth" &&
        python3 scripts/bench_cuda.py --bench "$build/bench_depth" --lib "$lib" --model "$build/random-8b-q4_0.gguf" ${BENCH_ARGS:-} || failed=1
fi
exit $failed
