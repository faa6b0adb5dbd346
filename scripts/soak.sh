#!/bin/sh
# The long runs behind the short ones of CI: random operations on every kind of cache, mutated states and calibrated data, llama-server under load.
#
#   scripts/soak.sh [BUILD] [MINUTES]     BUILD: a build folder, cmake -B BUILD -DKVQ_BUILD_TESTS=ON [-DKVQ_SANITIZE=address,undefined or thread]
#                                         MINUTES: of llama-server, 0: leave it out
#
# STEPS (100000): operations a method class. FUZZ (1000000): mutated files. One line for each run; exit code 1 when one failed.
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
build=${1:-$root/build}
minutes=${2:-20}
steps=${STEPS:-100000}
fuzz=${FUZZ:-1000000}
failed=0

run() {
    started=$(date +%s)
    if "$@" > "$build/soak.log" 2>&1; then
        echo "ok      $(($(date +%s) - started)) s   $*"
    else
        echo "FAILED  $*"
        tail -n 20 "$build/soak.log"
        failed=1
    fi
}

cmake --build "$build" --target test_store test_slots test_chain test_mrope test_fuzz_states test_fuzz_calibration || exit 1
# kinds of one test run with seeds of their own: a walk of n steps makes n operations on each
for seed in 1 2 3 4; do
    run "$build/tests/test_store" "$seed" $((steps / 4))
    run "$build/tests/test_slots" "$seed" $((steps / 4))
done
for seed in 1 2 3 4 5 6 7 8; do
    run "$build/tests/test_chain" "$seed" $((steps / 800))
    run "$build/tests/test_mrope" "$seed"
done
run "$build/tests/test_fuzz_states" $((fuzz / 5)) 1
run "$build/tests/test_fuzz_calibration" "$fuzz" 1
if [ "$minutes" != 0 ]; then
    for method in kivi minikv; do
        run python3 "$root/scripts/soak_server.py" --minutes "$minutes" --method "$method"
    done
fi
exit $failed
