#!/usr/bin/env python3
"""CPU speed of every cache on one machine: unmodified llama-bench, upstream's caches and ours in turn.

The model is random and attention-bound: 4 layers, 32 query and 8 KV heads of 128, embedding 128. Every arm is one llama-bench
process per round (it prefills the depth once and restores that state before every repetition); arms alternate, so that a slow
minute of the machine hits all of them. Figures are medians over all repetitions of all rounds.

Prints a table, the memory bandwidth measured by a STREAM-like add, and writes one JSON line per arm, test and depth.
Depth 32768 takes minutes per arm to prefill: --depths 8192,32768 --rounds 1 when there is time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

LAYERS, HEADS, KV_HEADS, HEAD, EMBED, FFN, VOCAB = 4, 32, 8, 128, 128, 256, 256
F16_BYTES = LAYERS * 2 * KV_HEADS * HEAD * 2  # of one cached token

# name: (upstream's cache type or None, our method, its options)
ARMS = {
    "upstream f16": ("f16", "", ""),
    "upstream q4_0": ("q4_0", "", ""),
    "f16": (None, "f16", ""),
    "kivi-2": (None, "kivi", "bits=2"),
    "xquant-1.38": (None, "xquant", "preset=1.38"),
    "higgs-2": (None, "higgs", "bits=2"),
}
CACHE_RATIO = {"f16": 1.0, "q4_0": 4.5 / 16}


def make_model(path: Path) -> None:
    import gguf

    rng = np.random.default_rng(0)
    w = gguf.GGUFWriter(path, "llama")
    w.add_block_count(LAYERS)
    w.add_context_length(1 << 20)
    w.add_embedding_length(EMBED)
    w.add_feed_forward_length(FFN)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_key_length(HEAD)
    w.add_value_length(HEAD)
    w.add_rope_dimension_count(HEAD)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(VOCAB)
    w.add_tokenizer_model("no_vocab")

    def matrix(name: str, rows: int, cols: int) -> None:
        x = rng.normal(scale=cols**-0.5, size=(rows, cols)).astype(np.float32)
        w.add_tensor(name, gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    def ones(name: str) -> None:
        w.add_tensor(name, np.ones(EMBED, np.float32))

    matrix("token_embd.weight", VOCAB, EMBED)
    matrix("output.weight", VOCAB, EMBED)
    ones("output_norm.weight")
    for il in range(LAYERS):
        b = f"blk.{il}."
        ones(b + "attn_norm.weight")
        ones(b + "ffn_norm.weight")
        matrix(b + "attn_q.weight", HEADS * HEAD, EMBED)
        matrix(b + "attn_k.weight", KV_HEADS * HEAD, EMBED)
        matrix(b + "attn_v.weight", KV_HEADS * HEAD, EMBED)
        matrix(b + "attn_output.weight", EMBED, HEADS * HEAD)
        matrix(b + "ffn_gate.weight", FFN, EMBED)
        matrix(b + "ffn_up.weight", FFN, EMBED)
        matrix(b + "ffn_down.weight", EMBED, FFN)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def bandwidth(threads: int, mib: int) -> float:
    """Bytes per second of a[i] = b[i] + c[i], best of 10, counted as STREAM counts: 24 bytes an element."""
    n = (mib << 20) // 8
    parts = [(np.zeros(n // threads), np.ones(n // threads), np.ones(n // threads)) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(10):
            t = time.perf_counter()
            list(pool.map(lambda p: np.add(p[1], p[2], out=p[0]), parts))
            best = max(best, 24 * (n // threads) * threads / (time.perf_counter() - t))
    return best


def folders(build_dir: str | None) -> tuple[Path, Path]:
    """llama-bench and libggml-kvq.so of --build-dir, else of the installed package."""
    if build_dir:
        found = {name: sorted(Path(build_dir).rglob(name)) for name in ("llama-bench", "libggml-kvq.so")}
        for name, paths in found.items():
            if not paths:
                sys.exit(f"{build_dir} holds no {name}; build it there or leave --build-dir out")
        return found["llama-bench"][0], found["libggml-kvq.so"][0]
    from ggml_kvq import _paths

    return _paths.program("llama-bench"), _paths.backend()


def command(bench: Path, backend: Path, model: Path, arm: str, a: argparse.Namespace, depth: int, test: str) -> tuple[list[str], dict[str, str]]:
    cache, method, opts = ARMS[arm]
    args = [str(bench), "-m", str(model), "-t", str(a.threads), "-fa", "1", "-r", str(a.reps), "-d", str(depth), "-o", "json"]
    args += ["-p", "0", "-n", str(a.gen)] if test == "tg" else ["-p", str(a.prompt), "-n", "0"]
    if cache:
        return args + ["-dev", "none", "-ctk", cache, "-ctv", cache], {}
    return args + ["-dev", "KVQ0"], {"GGML_BACKEND_PATH": str(backend), "KVQ_METHOD": method, "KVQ_OPTS": opts, "KVQ_MODEL": str(model)}


def run(args: list[str], env: dict[str, str], bench: Path) -> tuple[list[float], float | None]:
    """(tokens/s of every repetition, our cache's bytes as a share of f16's)."""
    done = subprocess.run(args, env={**os.environ, "LD_LIBRARY_PATH": str(bench.parent), **env}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(args)} ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    line = re.search(r"([\d.]+) MiB KV cache instead of ([\d.]+) MiB", done.stderr)
    return json.loads(done.stdout)[0]["samples_ts"], float(line[1]) / float(line[2]) if line else None


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--build-dir", help="folder with llama-bench and libggml-kvq.so (default: the installed package)")
    p.add_argument("--cache-dir", default=os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "ggml-kvq"), help="where the model is kept")
    p.add_argument("--arms", default=",".join(ARMS), help="some of: " + ", ".join(ARMS))
    p.add_argument("--depths", default="1024,8192", help="cached tokens before the measured ones")
    p.add_argument("--tests", default="tg,pp", help="tg: generation, pp: prefill of --prompt tokens (at the depths of --prompt-depths)")
    p.add_argument("--prompt-depths", default="8192")
    p.add_argument("--prompt", type=int, default=2048)
    p.add_argument("--gen", type=int, default=32)
    p.add_argument("--threads", "-t", type=int, default=2)
    p.add_argument("--reps", type=int, default=3, help="repetitions per process")
    p.add_argument("--rounds", type=int, default=2, help="times that the arms alternate")
    p.add_argument("--json", help="append the JSON lines here (default: stdout)")
    p.add_argument("--quick", action="store_true", help="seconds instead of minutes: does it run, not how fast")
    a = p.parse_args()
    if a.quick:
        a.depths, a.prompt_depths, a.prompt, a.gen, a.reps, a.rounds = "512", "512", 64, 4, 1, 1

    arms = [x.strip() for x in a.arms.split(",")]
    for x in arms:
        if x not in ARMS:
            p.error(f"no arm '{x}': it is one of {', '.join(ARMS)}")
    bench, backend = folders(a.build_dir)
    model = Path(a.cache_dir) / "random-4x32x8x128.gguf"
    if not model.is_file():
        model.parent.mkdir(parents=True, exist_ok=True)
        part = model.with_suffix(f".{os.getpid()}")
        make_model(part)
        part.rename(model)

    peak = bandwidth(a.threads, 64 if a.quick else 512)
    print(f"memory: {peak / 1e9:.1f} GB/s (add, {a.threads} threads)\n")
    tests = [(t, int(d)) for t in a.tests.split(",") for d in (a.depths if t == "tg" else a.prompt_depths).split(",")]
    out = open(a.json, "a") if a.json else sys.stdout
    rows = []
    for test, depth in tests:
        samples: dict[str, list[float]] = {x: [] for x in arms}
        ratio: dict[str, float | None] = {}
        for _ in range(a.rounds):
            for x in arms:
                args, env = command(bench, backend, model, x, a, depth, test)
                ts, share = run(args, env, bench)
                samples[x] += ts
                ratio[x] = CACHE_RATIO.get(ARMS[x][0] or "", share)
        base = statistics.median(samples[arms[0]])
        for x in arms:
            args, env = command(bench, backend, model, x, a, depth, test)
            median = statistics.median(samples[x])
            rate = median * depth * F16_BYTES * (ratio[x] or 0) if test == "tg" else None  # cache bytes read per second
            row = {"arm": x, "test": f"{test}{a.gen if test == 'tg' else a.prompt}", "depth": depth, "tokens_per_second": round(median, 3),
                   "against_first": round(median / base, 3), "samples": samples[x], "cache_ratio": ratio[x], "cache_bytes_per_second": rate,
                   "memory_bytes_per_second": peak, "threads": a.threads, "command": " ".join([f"{k}={shlex.quote(v)}" for k, v in env.items()] + [shlex.join(args)])}
            print(json.dumps(row), file=out, flush=True)
            rows.append(row)
    print(f"\n{'test':8} {'depth':>6}  {'cache':14} {'t/s':>9} {'ratio':>7} {'cache GB/s':>11} {'of memory':>10}")
    for r in rows:
        rate = r["cache_bytes_per_second"]
        share = f"{rate / 1e9:11.2f} {rate / peak:10.1%}" if rate else ""
        print(f"{r['test']:8} {r['depth']:6}  {r['arm']:14} {r['tokens_per_second']:9.2f} {r['against_first']:6.2f}x {share}")


if __name__ == "__main__":
    main()
