#!/usr/bin/env python3
"""Speed of caches on one GPU, upstream's and ours, on a random 8B-shaped Q4_0 model. Builds nothing.

    scripts/bench_cuda.py --bench build/bench_depth --lib build/lib [--kernels build/kernels/test_cuda] [--depths 1024 32768 131072]

Prints the kernels' own table (time of one layer's attention, floor = bytes / measured copy bandwidth) and then tokens/s. With
--memory also what the device's free memory fell by beside the load line: KV cache, llama.cpp's compute buffer, and the workspace that
the line promises at most. What is left over is what upstream's own cache leaves over as well (cuBLAS, CUDA graphs); 5 % more fails.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

LAYERS, WIDTH, HEADS, HEADS_KV, FFN, VOCAB = 32, 4096, 32, 8, 14336, 32000
CACHES = [
    ("upstream f16", "CUDA0", "f16", "", ""),
    ("upstream q8_0", "CUDA0", "q8_0", "", ""),
    ("upstream q4_0", "CUDA0", "q4_0", "", ""),
    ("kvq f16", "KVQ0", "f16", "f16", ""),
    ("kivi-2 g128", "KVQ0", "f16", "kivi", "bits=2,group=128"),
    ("kivi-2 g16", "KVQ0", "f16", "kivi", "bits=2,group=16"),
    ("kivi-4 g128", "KVQ0", "f16", "kivi", "bits=4,group=128"),
    ("kivi-4 g32", "KVQ0", "f16", "kivi", "bits=4"),
    ("xquant 1.38", "KVQ0", "f16", "xquant", ""),
    ("higgs-2", "KVQ0", "f16", "higgs", "bits=2"),
    ("higgs-4", "KVQ0", "f16", "higgs", "bits=4"),
    ("aqua-2 bias", "KVQ0", "f16", "aqua", "bits=2,predictor=bias"),
    ("aqua-2 k", "KVQ0", "f16", "aqua", "bits=2,predictor=k"),
    ("aqua-2 full", "KVQ0", "f16", "aqua", "bits=2,predictor=full"),
    ("zipcache-60", "KVQ0", "f16", "zipcache", ""),
    ("zipcache blind", "KVQ0", "f16", "zipcache", ""),
    ("minikv-50", "KVQ0", "f16", "minikv", ""),
]


def write_model(path: Path) -> None:
    """Random weights of the right shapes: Q4_0 blocks of 18 bytes (f16 scale, 32 nibbles), f32 norms."""
    import gguf

    rng = np.random.default_rng(1)
    w = gguf.GGUFWriter(str(path), "llama")
    w.add_block_count(LAYERS)
    w.add_context_length(1 << 18)
    w.add_embedding_length(WIDTH)
    w.add_feed_forward_length(FFN)
    w.add_head_count(HEADS)
    w.add_head_count_kv(HEADS_KV)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_dimension_count(WIDTH // HEADS)
    w.add_rope_freq_base(500000.0)
    w.add_vocab_size(VOCAB)
    w.add_tokenizer_model("none")

    def q4(name: str, rows: int, columns: int) -> None:
        blocks = rng.integers(0, 256, (rows, columns // 32, 18), dtype=np.uint8)
        blocks[:, :, :2] = np.frombuffer(np.float16(0.006).tobytes(), dtype=np.uint8)
        w.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    kv = WIDTH // HEADS * HEADS_KV
    q4("token_embd.weight", VOCAB, WIDTH)
    q4("output.weight", VOCAB, WIDTH)
    w.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for i in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            w.add_tensor(f"blk.{i}.{name}.weight", np.ones(WIDTH, np.float32))
        for name, rows, columns in (("attn_q", WIDTH, WIDTH), ("attn_k", kv, WIDTH), ("attn_v", kv, WIDTH), ("attn_output", WIDTH, WIDTH),
                                    ("ffn_gate", FFN, WIDTH), ("ffn_up", FFN, WIDTH), ("ffn_down", WIDTH, FFN)):
            q4(f"blk.{i}.{name}.weight", rows, columns)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def write_sidecar(model: Path, path: Path) -> None:
    """Calibrated data for it: means, and predictors of random q4_0 blocks that keep rows at about half their size."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
    from ggml_kvq.calibrate import files

    rng = np.random.default_rng(2)
    kv = WIDTH // HEADS * HEADS_KV
    meta = {"kvq.version": files.VERSION, "kvq.method": "aqua", **files.identity(model), "kvq.aqua.predictor": "full"}
    data = {}
    for i in range(LAYERS):
        for name, inputs in (("k", kv), ("v", 2 * kv)):
            data[f"kvq.aqua.blk.{i}.{name}.bias"] = rng.standard_normal(kv).astype(np.float32)
            if i:
                blocks = rng.integers(0, 256, (kv, inputs // 32, 18), dtype=np.uint8)
                blocks[:, :, :2] = np.frombuffer(np.float16(0.1 / inputs**0.5).tobytes(), dtype=np.uint8)
                data[f"kvq.aqua.blk.{i}.{name}.weight"] = blocks.reshape(kv, -1)
        if i:
            meta[f"kvq.aqua.blk.{i}.prev"] = i - 1
    files.write_sidecar(path, meta, data)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bench", type=Path, required=True, help="the program built from scripts/bench_depth.cpp")
    p.add_argument("--lib", type=Path, required=True, help="folder of libllama, libggml-cuda and libggml-kvq")
    p.add_argument("--kernels", type=Path, help="the program built from tests/native/test_cuda.cpp")
    p.add_argument("--model", type=Path, default=Path("random-8b-q4_0.gguf"), help="written when missing")
    p.add_argument("--depths", type=int, nargs="+", default=[1024, 32768, 131072])
    p.add_argument("--generate", type=int, default=64, help="tokens timed behind each depth")
    p.add_argument("--rounds", type=int, default=1, help="medians of so many runs of each, in turns")
    p.add_argument("--only", nargs="+", help="parts of cache names")
    p.add_argument("--memory", action="store_true", help="hold memory against the load line, at every depth")
    p.add_argument("--timeout", type=float, default=120)
    a = p.parse_args()
    if a.kernels:
        subprocess.run([a.kernels, "bench"], check=True)
    if not a.model.exists():
        write_model(a.model)
    sidecar = a.model.with_suffix(".aqua.gguf")
    if not sidecar.exists() and (not a.only or any(x in c[0] for x in a.only for c in CACHES if c[3] == "aqua")):
        write_sidecar(a.model, sidecar)
    print(f"{'cache':<16}{'depth':>8}{'prompt t/s':>12}{'last 2048':>12}{'generation t/s':>16}{'x f16':>8}", flush=True)
    chosen = [c for c in CACHES if not a.only or any(x in c[0] for x in a.only)]
    failed = False
    overhead = 0.0
    for depth in a.depths:
        rounds: dict[str, list[list[float]]] = {}
        base = 0.0
        for turn in range(a.rounds):  # caches take turns: what changes with time meets all of them
            for name, device, cache_type, method, opts in chosen:
                env = {**os.environ, "LD_LIBRARY_PATH": str(a.lib), "KVQ_MODEL": str(a.model)}
                if method:
                    env["KVQ_CUDA_OBSERVE"] = "0" if "blind" in name else "1"  # nobody scores cells: what observation costs
                    env |= {"GGML_BACKEND_PATH": str(a.lib / "libggml-kvq.so"), "KVQ_METHOD": method, "KVQ_OPTS": opts}
                if method == "aqua":
                    env["KVQ_CONFIG"] = str(sidecar)
                command = [str(a.bench), str(a.model), device, str(depth), str(a.generate), cache_type]
                try:
                    out = subprocess.run(command, env=env, capture_output=True, text=True, timeout=a.timeout)
                except subprocess.TimeoutExpired:
                    print(f"{name:<16}{depth:>8}  longer than {a.timeout:.0f} s", flush=True)
                    continue
                fields = out.stdout.split()
                if out.returncode or len(fields) != 7:
                    print(f"{name:<16}{depth:>8}  failed: {out.stderr.strip()[-200:]}", flush=True)
                    continue
                rounds.setdefault(name, []).append([float(x) for x in fields[1:]])
                if turn + 1 < a.rounds:
                    continue
                prompt, last, speed, used, kv, compute = (statistics.median(column) for column in zip(*rounds[name]))
                base = base or speed
                print(f"{name:<16}{depth:>8}{prompt:>12.0f}{last:>12.0f}{speed:>16.1f}{speed / base:>8.2f}", flush=True)
                if a.memory:
                    line = re.search(r"take up to ([\d.]+) MiB more", out.stderr)
                    workspace = float(line[1]) if line else 0.0
                    if not method:
                        overhead = max(overhead, used - kv - compute)
                    said = kv + compute + workspace + (overhead if method else 0.0)
                    off = (used - said) / said if method else 0.0
                    failed |= abs(off) > 0.05
                    print(
                        f"    {used:.0f} MiB taken: KV cache {kv:.1f}, compute buffer {compute:.1f}, workspace {workspace:.1f}, "
                        f"the rest {used - kv - compute - workspace:.1f}" + (f" ({100 * off:+.1f} % of what is said, with upstream's rest)" if method else ""),
                        flush=True,
                    )
    if failed:
        sys.exit("memory is not as said")


if __name__ == "__main__":
    main()
