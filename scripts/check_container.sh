#!/usr/bin/env bash
# Builds the CPU image without a daemon and asks its server once.
#   scripts/check_container.sh WHEEL        root; buildah, debootstrap, curl (Debian's packages)
# The base image is made by debootstrap, so that no image registry is needed. ROOTS=DIR: roots of scripts/check_wheel.sh,
# taken when they are there. The machine's own certificates are lent to the build, for networks with a proxy.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# = 1 ] && [ -f "$1" ] || { echo "usage: scripts/check_container.sh WHEEL" >&2; exit 2; }
for program in buildah debootstrap curl; do
    command -v $program >/dev/null || { echo "check_container: no $program; apt-get install $program" >&2; exit 2; }
done
work=$(mktemp -d "${TMPDIR:-/tmp}/ggml-kvq-container.XXXXXX")
export BUILDAH_ISOLATION=chroot
base=localhost/ggml-kvq-check-base # not Debian's name: the next build on this machine wants Debian's own image
containers=()
server=
cleanup() {
    [ -z "$server" ] || kill "$server" 2>/dev/null || true
    for c in "${containers[@]}"; do buildah rm "$c" >/dev/null 2>&1 || true; done
    buildah rmi "$base" >/dev/null 2>&1 || true
    rm -rf "$work"
}
trap cleanup EXIT

if ! buildah inspect --type image $base >/dev/null 2>&1; then
    root=${ROOTS:-$work}/bookworm
    [ -x "$root/usr/bin/python3" ] || debootstrap --variant=minbase bookworm "$root" "${MIRROR:-http://deb.debian.org/debian}" >"$work/log" 2>&1
    c=$(buildah from scratch)
    containers+=("$c")
    tar -C "$root" --exclude=./try --exclude='./proc/*' --exclude='./dev/*' -c . | tar -x -C "$(buildah mount "$c")"
    buildah commit -q "$c" $base >/dev/null
fi
mkdir -p "$work/context/dist"
cp "$1" "$work/context/dist/"
cp Dockerfile .dockerignore "$work/context/"
buildah build -q --from $base --format docker --pull-never --network host -v /etc/ssl/certs:/etc/ssl/certs:ro -t ggml-kvq "$work/context"
c=$(buildah from --pull-never localhost/ggml-kvq)
containers+=("$c")
mkdir -p "$(buildah mount "$c")/models"
cp models/kvq-demo-q8_0.gguf "$(buildah mount "$c")/models/model.gguf"
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
buildah run --user 10001 -e LLAMA_ARG_MODEL=/models/model.gguf -e KVQ_METHOD=kivi -e KVQ_OPTS=bits=4 -e LLAMA_ARG_HOST=127.0.0.1 \
    -e LLAMA_ARG_PORT="$port" "$c" -- llama-server >"$work/server" 2>&1 &
server=$!
for _ in $(seq 120); do
    curl -sf "http://127.0.0.1:$port/health" >/dev/null && break
    kill -0 $server 2>/dev/null || break
    sleep 1
done
curl -sf "http://127.0.0.1:$port/completion" -d '{"prompt":"The file","n_predict":8,"temperature":0}' >"$work/answer" ||
    { tail -20 "$work/server" >&2; echo "check_container: the server did not answer" >&2; exit 1; }
grep '^ggml-kvq: kivi' "$work/server"
python3 -c 'import json, sys; print("answer:", repr(json.load(open(sys.argv[1]))["content"]))' "$work/answer"
echo "check_container: the image answers"
