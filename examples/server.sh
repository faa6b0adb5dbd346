#!/bin/sh
# llama-server with a compressed cache and two slots; ask it once and stop it.
#   examples/server.sh [model.gguf] [method]
# llama-server is the launcher that `pip install ggml-kvq` puts on PATH; it passes everything else to upstream's server.
set -eu
model=${1:-$(dirname "$0")/../models/kvq-demo-q8_0.gguf}
method=${2:-xquant}
port=${PORT:-8089}

llama-server -m "$model" --kv-method "$method" -c 4096 -np 2 --host 127.0.0.1 --port "$port" >"${LOG:-/dev/null}" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null; wait $server 2>/dev/null || true' EXIT INT TERM

tries=0
until curl -fs "http://127.0.0.1:$port/health" >/dev/null 2>&1; do
    kill -0 $server 2>/dev/null || { echo "the server stopped; set LOG=server.log to see why" >&2; exit 1; }
    tries=$((tries + 1))
    [ $tries -lt 240 ] || { echo "the server did not answer on port $port within 60 s; set PORT to a free one" >&2; exit 1; }
    sleep 0.25
done

curl -fs "http://127.0.0.1:$port/completion" -H 'Content-Type: application/json' \
    -d '{"prompt": "The KV cache", "n_predict": 24, "temperature": 0}'
echo
