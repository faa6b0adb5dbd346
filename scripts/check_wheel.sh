#!/usr/bin/env bash
# A stranger's path: the wheel in bare roots that have Python and no compiler, from nothing to the first compressed answer.
#   scripts/check_wheel.sh WHEEL [SUITE...]        default: bookworm trixie; root, debootstrap (Debian's package)
# An AArch64 wheel on another machine: qemu-user-static and binfmt-support too; times mean nothing then. Where there is a static
# qemu of the wheel's family, llama-completion is also run as on older CPUs of it, and has to write the same text on each.
# ADDON=<ggml_kvq_cu13 wheel>: installed too; there is no GPU in a root, so it has to say in one line what it needs.
# ROOTS=DIR keeps the roots for the next time, MIRROR=<Debian's mirror>, MODEL=<GGUF>, WHEELS=<folder with wheels of the dependencies>.
set -euo pipefail
[ $# -ge 1 ] && [ -f "$1" ] || { echo "usage: scripts/check_wheel.sh WHEEL [SUITE...]" >&2; exit 2; }
[ "$(id -u)" = 0 ] || { echo "check_wheel: chroot needs root" >&2; exit 2; }
wheel=$(realpath "$1")
for path in ADDON ROOTS MODEL WHEELS; do # from where it was called
    [ -z "${!path:-}" ] || export $path="$(realpath -m "${!path}")"
done
cd "$(dirname "$0")/.."
shift
[ $# -gt 0 ] || set -- bookworm trixie
case $wheel in *_aarch64.whl) arch=arm64 family=aarch64 ;; *) arch=amd64 family=x86_64 ;; esac
foreign=
if [ "$(uname -m)" != $family ]; then
    foreign=-$arch
    grep -qs '^flags:.*F' "/proc/sys/fs/binfmt_misc/qemu-$family" || {
        echo "check_wheel: this kernel hands no $family program to an emulator: apt-get install qemu-user-static binfmt-support;" \
            "mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc; update-binfmts --enable qemu-$family" >&2
        exit 2
    }
fi
qemu=$(command -v qemu-$family-static || true)
platforms=() # of wheels that the roots can take
for minor in $(seq 17 36); do platforms+=(--platform "manylinux_2_${minor}_$family"); done
platforms+=(--platform "manylinux2014_$family")
model=$(realpath "${MODEL:-models/kvq-demo-q8_0.gguf}")
mirror=${MIRROR:-http://deb.debian.org/debian}
roots=${ROOTS:-$(mktemp -d "${TMPDIR:-/tmp}/ggml-kvq-roots.XXXXXX")}
mkdir -p "$roots"
failed=0
root=
cleanup() { # nothing stays mounted: whoever removes a root must not remove the machine's devices
    for at in dev proc; do
        [ -z "$root" ] || ! mountpoint -q "$root/$at" || umount "$root/$at" || exit 1
    done
    [ -n "${ROOTS:-}" ] || rm -rf --one-file-system "$roots"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

for suite in "$@"; do
    name=$suite$foreign
    root=$roots/$name
    if [ ! -x "$root/usr/bin/python3" ]; then
        command -v debootstrap >/dev/null || { echo "check_wheel: no debootstrap; apt-get install debootstrap" >&2; exit 2; }
        debootstrap --arch=$arch --variant=minbase --include=python3,python3-venv,ca-certificates "$suite" "$root" "$mirror" \
            >"$roots/$name.log" 2>&1 || { tail -3 "$roots/$name.log" >&2; exit 1; }
    fi
    rm -rf "$root/try" && mkdir -p "$root/try/wheels"
    cp "$wheel" "$root/try/wheels/"
    [ -z "${ADDON:-}" ] || cp "$ADDON" "$root/try/"
    cp "$model" "$root/try/model.gguf"
    cp examples/prompt.txt "$root/try/"
    [ -z "$qemu" ] || cp "$qemu" "$root/try/qemu"
    # what the wheel depends on is fetched here: the root has no network of its own to configure
    abi=$(chroot "$root" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    downloading=$(date +%s)
    if [ -n "${WHEELS:-}" ]; then cp "$WHEELS"/*.whl "$root/try/wheels/"; else
        python3 -m pip -q download --only-binary :all: --python-version "$abi" "${platforms[@]}" -d "$root/try/wheels" "$root"/try/wheels/ggml_kvq-*.whl
    fi
    echo "check_wheel: dependencies of $name: $(find "$root/try/wheels" -name '*.whl' ! -name 'ggml_kvq-*' | wc -l) wheels, $(($(date +%s) - downloading)) s of download"
    if chroot "$root" sh -c 'command -v gcc cc c++ make cmake' >/dev/null; then
        echo "check_wheel: $name has a compiler; this proves nothing" >&2
        exit 1
    fi
    mountpoint -q "$root/proc" || mount -t proc proc "$root/proc"
    mountpoint -q "$root/dev" || mount --bind /dev "$root/dev"
    status=0
    chroot "$root" env -i PATH=/usr/bin:/bin HOME=/root LANG=C.UTF-8 sh -eu >"$roots/$name.out" 2>&1 <<'S' || status=$?
cd /try
begin=$(date +%s.%N)
python3 -m venv venv
venv/bin/pip -q install --no-index --find-links wheels wheels/ggml_kvq-*.whl
installed=$(date +%s.%N)
times >installed
venv/bin/llama-cli -m model.gguf --kv-method xquant -f prompt.txt -n 48 --temp 0 -st </dev/null >answer 2>log
end=$(date +%s.%N)
times >answered
grep '^ggml-kvq:' log
python3 - "$begin" "$installed" "$end" <<'P' # seconds, and those of a processor: other work on the machine counts less
import re, sys

def cpu(path):  # of children, from the shell's times
    return sum(60 * int(m) + float(s) for m, s in re.findall(r"(\d+)m([\d.]+)s", open(path).read().splitlines()[1]))

begin, installed, end = map(float, sys.argv[1:])
first = cpu("installed")
print("times: venv and install %.1f s (of a processor %.1f), first answer %.1f s (%.1f)"
      % (installed - begin, first, end - installed, cpu("answered") - first))
P
venv/bin/ggml-kvq doctor
for method in kivi higgs zipcache minikv specache; do
    venv/bin/llama-completion -m model.gguf --kv-method $method -p "The file" -n 8 -no-cnv </dev/null >said 2>&1 ||
        { echo "$method: exit $?"; tail -5 said; exit 1; }
    grep -m1 "^ggml-kvq: $method" said
done
venv/bin/llama-completion -m model.gguf --kv-bits 2.5 -p "The file" -n 8 -no-cnv </dev/null >said 2>&1 ||
    { echo "--kv-bits: exit $?"; tail -5 said; exit 1; }
grep -m1 "^ggml-kvq: auto" said
venv/bin/python - <<'P'
from ggml_kvq import Model

with Model("model.gguf", "kivi", "bits=4", n_ctx=512) as m:
    print("python:", "".join(m.generate("The file", max_tokens=8)), round(m.kv_stats()["bits"], 2), "bits")
P
if [ -x qemu ]; then # the same text on other CPUs; the emulator offers no AVX-512
    lib=$(echo "$PWD"/venv/lib/python3*/site-packages/ggml_kvq/lib)
    export GGML_BACKEND_PATH="$lib/libggml-kvq.so" KVQ_METHOD=kivi KVQ_OPTS=window=0 KVQ_MODEL=model.gguf OMP_NUM_THREADS=2
    long=$(for i in $(seq 30); do printf 'The file %d is open. ' "$i"; done) # pages seal: kernels of codes run
    set -- "$lib/llama-completion" -m model.gguf -dev KVQ0 -fa on -c 1024 -t 2 -p "$long" -n 4 --temp 0 -no-cnv
    "$@" </dev/null >text 2>/dev/null
    case $(uname -m) in aarch64) cpus="cortex-a53 cortex-a72 cortex-a76 neoverse-n1 a64fx max" ;; *) cpus="Nehalem Haswell Skylake-Server" ;; esac
    for cpu in $cpus; do
        ./qemu -cpu $cpu "$@" </dev/null >text.cpu 2>log.cpu || { echo "emulated: $cpu: exit $?"; tail -3 log.cpu; exit 1; }
        # llama-completion loses line feeds at its end now and then, with its own cache too
        [ "$(cat text)" = "$(cat text.cpu)" ] || { echo "emulated: $cpu writes another text:"; cat text.cpu; exit 1; }
        grep -q ' pages sealed' log.cpu || { echo "emulated: $cpu: no page sealed, so no kernel was tried"; exit 1; }
        echo "emulated: $cpu: the same text, $(grep -o 'kernels [a-z0-9_-]*' log.cpu | head -1); ggml-cpu's: $(sed -n 's/^.*| CPU : //p' log.cpu | sed 's/ = 1//g; s/ | / /g' | head -1)"
    done
    unset GGML_BACKEND_PATH KVQ_METHOD KVQ_OPTS KVQ_MODEL OMP_NUM_THREADS
fi
if ls ggml_kvq_cu13-*.whl >/dev/null 2>&1; then
    venv/bin/pip -q install --no-index --find-links wheels ggml_kvq_cu13-*.whl
    KVQ_BACKEND=$(venv/bin/python -m ggml_kvq_cu13)
    export KVQ_BACKEND
    echo "add-on: $(du -h "$KVQ_BACKEND" | cut -f1) at $KVQ_BACKEND"
    for command in "venv/bin/llama-completion -m model.gguf --kv-method kivi -p x -n 4 -no-cnv" "venv/bin/ggml-kvq methods"; do
        code=0
        $command </dev/null >said 2>&1 || code=$?
        { [ $code -ge 1 ] && [ $code -lt 126 ] && [ "$(wc -l <said)" = 1 ] && grep -q "it has CUDA kernels and needs the CUDA runtime: pip install" said; } ||
            { echo "$command: exit $code"; cat said; exit 1; }
        echo "add-on: exit $code, $(cat said)"
    done
    code=0 # a program of llama.cpp's own that is pointed at it
    lib=$(dirname venv/lib/python3*/site-packages/ggml_kvq/lib/llama-completion)
    GGML_BACKEND_PATH=$KVQ_BACKEND "$lib/llama-completion" -m model.gguf -p "The file" -n 4 -no-cnv </dev/null >said 2>&1 || code=$?
    echo "add-on: without our launcher exit $code, $(grep -m1 libggml-kvq said)"
    [ $code -lt 126 ]
    unset KVQ_BACKEND
    venv/bin/llama-completion -m model.gguf --kv-method kivi -p "The file" -n 4 -no-cnv </dev/null >said 2>&1
    grep -m1 '^ggml-kvq: kivi' said
fi
S
    umount "$root/dev" "$root/proc"
    echo "== $name: $(. "$root/etc/os-release" && echo "$PRETTY_NAME"), glibc $(chroot "$root" ldd --version | sed -n '1s/.* //p'), python $abi"
    cat "$roots/$name.out"
    if [ $status -ne 0 ] || ! grep -q '^ggml-kvq: xquant' "$roots/$name.out" || ! grep -q '^python:' "$roots/$name.out"; then
        echo "check_wheel: $name FAILED (exit $status)"
        failed=1
    fi
done
[ $failed = 0 ] && echo "check_wheel: every root answered"
exit $failed
