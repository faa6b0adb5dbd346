#!/usr/bin/env python3
"""CPU speed of every cache on one machine: libllama of the pinned llama.cpp, upstream's caches and ours in turn.

Every arm is a context of the same model in this one process; upstream's arms run on llama.cpp's CPU backend alone.
Arms take turns of a few tokens, so that a slow minute of the machine hits all of them. Figures are medians over the
rounds.

The default model is random and attention-bound: 4 layers, 32 query and 8 KV heads of 128, embedding 128; --heads,
--kv-heads, --head-size, --embed, --ffn and --layers give other shapes, --latent one with multi-head latent attention.
`--layers 2 --embed 4096 --ffn 14336` are two of the 32 layers of an 8B model, weights included. A cache is filled to
the depth as sequences of 256 tokens, which then become one (llama_memory_seq_cp in a unified cache moves no data): the
cells hold what the model computes for its tokens, and no arm has to attend to the whole depth while it fills. Most of
the time still goes into filling upstream's caches at 32k (its masks are read cell by cell); --depths 1024,8192 takes a
minute.

--overhead measures what watching attention costs instead: zipcache and minikv against the same method without it, a
prompt of --prompt tokens and generation behind 3500, as medians of the ratios of turns that follow each other, and by
the fastest turn (prompt) or step. With -t 1 in seconds of the processor.

Prints a table, the memory bandwidth measured by a STREAM-like add, and writes one JSON line per arm, test and depth.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, c_int8, c_int32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from ggml_kvq import Model
from ggml_kvq.core import llama

VOCAB = 256
LATENT_EMBED = 128  # of the model with latent attention
CHUNK = 256  # tokens of a sequence while a cache is filled

# name: (upstream's cache type or None, our method, its options; upstream's "no-fa": without flash attention)
ARMS: dict[str, tuple[str | None, str, str]] = {
    "upstream f16": ("f16", "", ""),
    "upstream q4_0": ("q4_0", "", ""),
    "f16": (None, "f16", ""),
    "kivi-2": (None, "kivi", "bits=2"),
    "xquant-1.38": (None, "xquant", "preset=1.38"),
    "higgs-2": (None, "higgs", "bits=2"),
    "aqua-bias": (None, "aqua", "predictor=bias,first_bits=2"),
}
DEFAULT_ARMS = list(ARMS)
ARMS |= {  # when they are asked for
    "upstream f16 -fa off": ("f16", "", "no-fa"),
    "upstream bf16": ("bf16", "", ""),
    "upstream q8_0": ("q8_0", "", ""),
}
# what watches attention, and the same without it; percent that it may cost in prefill and in generation
KIVI = "kivi:group=16:scales=u8"
OVERHEAD: dict[str, tuple[str, str, float, float]] = {
    "one cache twice": (KIVI + ":eta=0", KIVI, 0, 0),  # the noise of the rows below
    "zipcache": ("zipcache", "zipcache:probe=0.0001", 12, 3),
    "minikv, all kept": ("minikv:hh=0.75", KIVI, 60, 3),
    "minikv": ("minikv", KIVI, 60, 3),
}
CACHE_RATIO = {"f16": 1.0, "bf16": 1.0, "q8_0": 8.5 / 16, "q4_0": 4.5 / 16}


class Writer:
    """A random model with weights in 8 bits."""

    def __init__(self, path: Path, arch: str, layers: int, embed: int, ffn: int) -> None:
        import gguf

        self.rng, self.kind, self.quantize = (
            np.random.default_rng(0),
            gguf.GGMLQuantizationType.Q8_0,
            gguf.quants.quantize,
        )
        self.embed, self.gguf = embed, gguf.GGUFWriter(path, arch)
        w = self.gguf
        w.add_block_count(layers)
        w.add_context_length(1 << 20)
        w.add_embedding_length(embed)
        w.add_feed_forward_length(ffn)
        w.add_layer_norm_rms_eps(1e-5)
        w.add_vocab_size(VOCAB)
        w.add_tokenizer_model("no_vocab")
        self.matrix("token_embd.weight", VOCAB, embed)
        self.matrix("output.weight", VOCAB, embed)
        self.ones("output_norm.weight", embed)
        for il in range(layers):
            b = f"blk.{il}."
            self.ones(b + "attn_norm.weight", embed)
            self.ones(b + "ffn_norm.weight", embed)
            self.matrix(b + "ffn_gate.weight", ffn, embed)
            self.matrix(b + "ffn_up.weight", ffn, embed)
            self.matrix(b + "ffn_down.weight", embed, ffn)

    def matrix(self, name: str, *shape: int) -> None:
        x = self.rng.normal(scale=shape[-1] ** -0.5, size=shape).astype(np.float32)
        self.gguf.add_tensor(name, self.quantize(x, self.kind), raw_dtype=self.kind)

    def ones(self, name: str, n: int) -> None:
        self.gguf.add_tensor(name, np.ones(n, np.float32))

    def close(self) -> None:
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_tensors_to_file()
        self.gguf.close()


def make_model(path: Path, a: argparse.Namespace) -> None:
    heads, kv_heads, head, embed = a.heads, a.kv_heads, a.head_size, a.embed
    m = Writer(path, "llama", a.layers, embed, a.ffn)
    w = m.gguf
    w.add_head_count(heads)
    w.add_head_count_kv(kv_heads)
    w.add_key_length(head)
    w.add_value_length(head)
    w.add_rope_dimension_count(head)
    for il in range(a.layers):
        b = f"blk.{il}."
        m.matrix(b + "attn_q.weight", heads * head, embed)
        m.matrix(b + "attn_k.weight", kv_heads * head, embed)
        m.matrix(b + "attn_v.weight", kv_heads * head, embed)
        m.matrix(b + "attn_output.weight", embed, heads * head)
    m.close()


def make_latent_model(path: Path, heads: int, layers: int = 4, ffn: int = 256) -> None:
    """Multi-head latent attention with the widths of DeepSeek-V2 and V3: 512 latent and 64 rotary channels, no
    experts.
    """
    latent, rotary, nope, value = 512, 64, 128, 128
    m = Writer(path, "deepseek2", layers, LATENT_EMBED, ffn)
    w = m.gguf
    w.add_head_count(heads)
    w.add_head_count_kv(1)
    w.add_key_length(latent + rotary)
    w.add_value_length(latent)
    w.add_key_length_mla(nope + rotary)
    w.add_value_length_mla(value)
    w.add_rope_dimension_count(rotary)
    w.add_kv_lora_rank(latent)
    w.add_q_lora_rank(LATENT_EMBED)
    w.add_leading_dense_block_count(layers)
    w.add_expert_count(2)
    w.add_expert_used_count(1)
    w.add_expert_shared_count(1)
    w.add_expert_feed_forward_length(32)
    w.add_expert_weights_scale(1.0)
    for il in range(layers):
        b = f"blk.{il}."
        m.ones(b + "attn_q_a_norm.weight", LATENT_EMBED)
        m.ones(b + "attn_kv_a_norm.weight", latent)
        m.matrix(b + "attn_q_a.weight", LATENT_EMBED, LATENT_EMBED)
        m.matrix(b + "attn_q_b.weight", heads * (nope + rotary), LATENT_EMBED)
        m.matrix(b + "attn_kv_a_mqa.weight", latent + rotary, LATENT_EMBED)
        m.matrix(b + "attn_k_b.weight", heads, latent, nope)
        m.matrix(b + "attn_v_b.weight", heads, value, latent)
        m.matrix(b + "attn_output.weight", LATENT_EMBED, heads * value)
    m.close()


def make_means(model: Path, out: Path, layers: int, width: int) -> None:
    """Channel means for the random model, as large as its keys and values: what they are does not change the speed."""
    from ggml_kvq.calibrate import files, means

    rng = np.random.default_rng(1)
    fit = means.Means(n_tokens=1)
    for il in range(layers):
        fit.mean[il] = (rng.normal(size=width).astype(np.float32), rng.normal(size=width).astype(np.float32))
        fit.removed[il] = (0.5, 0.5)
    files.write_sidecar(out, files.fields(model, fit, 4), files.arrays(fit))


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


class Pool:
    """Threads as llama.cpp's programs make them for a context (llama_attach_threadpool): a ggml without OpenMP starts
    new ones for each graph else. They sleep between turns, so that no other arm shares the cores with them.
    """

    def __init__(self, threads: int) -> None:
        loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
        self.cpu = ctypes.CDLL(next(x for x in sorted(loaded) if "libggml-cpu" in x))
        base = ctypes.CDLL(next(x for x in sorted(loaded) if "libggml-base" in x))
        params = ctypes.create_string_buffer(4096)  # more than ggml_threadpool_params takes
        base.ggml_threadpool_params_init(params, threads)
        self.cpu.ggml_threadpool_new.restype = c_void_p
        self.pool = c_void_p(self.cpu.ggml_threadpool_new(params))

    def attach(self, lib: ctypes.CDLL, ctx: c_void_p) -> None:
        lib.llama_attach_threadpool.argtypes = [c_void_p, c_void_p, c_void_p]
        lib.llama_attach_threadpool(ctx, self.pool, None)

    def pause(self) -> None:
        self.cpu.ggml_threadpool_pause(self.pool)


class Arm:
    """A context of one cache, filled to `depth` tokens of sequence 0."""

    clock = staticmethod(time.perf_counter)
    threads: int = 0  # of a pool that upstream's arms share; 0: there is none
    pool: Pool | None = None
    shared: Model | None = None  # weights of all arms: where they lie in memory moves a step by several percent

    def __init__(self, name: str, path: Path, depth: int, room: int, threads: int, config: Path | None) -> None:
        cache, method, opts = ARMS[name]
        self.name = name
        self.model = Arm.shared or Model(
            path,
            kv_method=method or "upstream",
            kv_opts=opts if method and opts else None,
            kv_config=config,
            n_ctx=256,
            n_threads=threads,
            device=None,
        )
        libs = self.model._libs
        self.lib, kvq = libs.llama, libs.kvq
        seq_cp = self.lib.llama_memory_seq_cp
        seq_cp.restype, seq_cp.argtypes = None, [c_void_p, c_int32, c_int32, c_int32, c_int32]
        params = self.lib.llama_context_default_params()
        n_seq = -(-depth // CHUNK)
        params.n_ctx = -(-(depth + room) // 256) * 256
        params.n_batch, params.n_ubatch, params.n_seq_max = 2048, 512, n_seq + 1
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type, params.kv_unified = int(opts != "no-fa"), True
        params.type_k = params.type_v = llama.GGML_TYPES[cache or "f16"]
        data = os.fsencode(config) if config else None
        if method and kvq is not None and kvq.kvq_configure(method.encode(), opts.encode(), data, os.fsencode(path)):
            sys.exit(f"{name}: {kvq.kvq_last_error().decode()}")
        self.ctx = self.lib.llama_init_from_model(self.model._model, params)
        if method and kvq is not None:
            kvq.kvq_configure(None, None, None, None)
        if not self.ctx:
            sys.exit(f"{name}: no context of {params.n_ctx} tokens")
        self.pooled = not method and Arm.threads > 1
        if self.pooled:
            Arm.pool = Arm.pool or Pool(Arm.threads)
            Arm.pool.attach(self.lib, self.ctx)
        self.memory = self.lib.llama_get_memory(self.ctx)
        self.ratio = CACHE_RATIO.get(cache or "", 0.0)
        if method and kvq is not None:
            from ggml_kvq.core import native

            stats = native.kvq_stats()
            kvq.kvq_cache_stats(kvq.kvq_cache_count() - 1, ctypes.byref(stats))
            self.ratio = stats.bytes_total / stats.bytes_f16
        self.rng = np.random.default_rng(0)
        self.pos = 0
        for seq in range(n_seq):
            self.decode(min(CHUNK, depth - self.pos), seq + 1)
            seq_cp(self.memory, seq + 1, 0, -1, -1)
        self.depth = depth

    def decode(self, n: int, seq: int = 0) -> None:
        """n random tokens behind the last position."""
        tokens = self.rng.integers(0, self.model.n_vocab, n)
        ids = (c_int32 * 1)(seq)
        batch = llama.llama_batch(
            n_tokens=n,
            token=(c_int32 * n)(*tokens.tolist()),
            pos=(c_int32 * n)(*range(self.pos, self.pos + n)),
            n_seq_id=(c_int32 * n)(*[1] * n),
            seq_id=ctypes.cast(
                (POINTER(c_int32) * n)(*[ctypes.cast(ids, POINTER(c_int32))] * n), POINTER(POINTER(c_int32))
            ),
            logits=(c_int8 * n)(*[0] * (n - 1), 1),
        )
        status = self.lib.llama_decode(self.ctx, batch)
        if status:
            sys.exit(f"{self.name}: llama_decode of {n} tokens at {self.pos} returned {status}")
        self.lib.llama_synchronize(self.ctx)
        self.pos += n

    def generate(self, n: int) -> tuple[float, list[float]]:
        """(tokens/s, seconds of every step), one warm-up step before."""
        self.decode(1)
        steps = []
        for _ in range(n):
            t = self.clock()
            self.decode(1)
            steps.append(self.clock() - t)
        if self.pooled and Arm.pool:
            Arm.pool.pause()
        return n / sum(steps), steps

    def prompt(self, n: int) -> float:
        """Tokens/s of n tokens in ubatches of 512; they are forgotten again."""
        back = self.pos
        t = self.clock()
        for i in range(0, n, 512):
            self.decode(min(512, n - i))
        rate = n / (self.clock() - t)
        if back:
            self.lib.llama_memory_seq_rm(self.memory, 0, back, -1)
        else:
            self.lib.llama_memory_clear(self.memory, True)
        self.pos = back
        return rate

    def close(self) -> None:
        self.lib.llama_free(self.ctx)
        if self.model is not Arm.shared:
            self.model.close()


def f16_bytes(path: Path) -> int:
    """Bytes of one token in an f16 cache of the model."""
    with Model(path, kv_method="f16", n_ctx=256) as m:
        stats = m.kv_stats()
        return int(stats["bytes_f16"]) // int(stats["n_cells"])


def measure(a: argparse.Namespace, test: str, depth: int, path: Path) -> dict[str, dict[str, Any]]:
    """{arm: rates, steps, cache_ratio} of one test at one depth, arms in turn."""
    room = (a.gen + 1) * a.rounds + a.prompt + 512 if test == "pp" else (a.gen + 1) * a.rounds + 512
    arms = []
    for name in a.arms:
        if test == "pp" and name != a.arms[0] and ARMS[name][0] not in (None, "f16", "bf16"):
            continue  # upstream reads its quantised caches row by row in prefill: minutes a turn
        t = time.perf_counter()
        arms.append(Arm(name, path, depth, room, a.threads, a.kv_config if ARMS[name][1] == "aqua" else None))
        print(f"{name}: {depth} tokens in {time.perf_counter() - t:.1f} s", file=sys.stderr)
    found: dict[str, dict[str, Any]] = {x.name: {"rates": [], "steps": [], "cache_ratio": x.ratio} for x in arms}
    for i in range(a.rounds if test == "tg" else a.prompt_rounds):
        for x in arms if i % 2 == 0 or not a.overhead else arms[::-1]:
            if test == "tg":
                rate, steps = x.generate(a.gen)
                found[x.name]["steps"] += steps
            else:
                rate = x.prompt(a.prompt)
            found[x.name]["rates"].append(rate)
    for x in arms:
        x.close()
    return found


def print_overhead(rows: list[dict[str, Any]]) -> None:
    """The table of --overhead: time with over time without, of each round."""
    samples = {(r["test"], r["arm"]): r["samples"] for r in rows}
    print(f"\n{'test':8} {'watched':18} {'against':24} {'overhead':>9} {'quartiles':>18} {'fastest':>8} {'at most':>8}")
    best = {(r["test"], r["arm"]): r["step_ms_least"] or 1 / max(r["samples"]) for r in rows}
    for test in dict.fromkeys(r["test"] for r in rows):
        for name, (watched, plain, *limits) in OVERHEAD.items():
            ratios = sorted(
                100 * (y / x - 1) for x, y in zip(samples[test, watched], samples[test, plain], strict=True)
            )
            q = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            print(
                f"{test:8} {name:18} {plain:24} {q[1]:8.1f}% {q[0]:8.1f} to {q[2]:5.1f}%"
                f" {100 * (best[test, watched] / best[test, plain] - 1):7.1f}% {limits[test.startswith('tg')]:7.0f}%"
            )


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", "-m", type=Path, help="GGUF file (default: the random model, made on first use)")
    p.add_argument(
        "--kv-config",
        type=Path,
        help="calibrated data of the model for aqua (default with the random model: random means)",
    )
    p.add_argument(
        "--cache-dir",
        default=os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "ggml-kvq"),
        help="where the random model is kept",
    )
    p.add_argument("--heads", type=int, default=32, help="query heads of the random model")
    p.add_argument("--kv-heads", type=int, default=8)
    p.add_argument("--head-size", type=int, default=128)
    p.add_argument("--layers", type=int, default=4, help="of the random model, as the two below")
    p.add_argument("--embed", type=int, default=128, help="width of the residual stream")
    p.add_argument("--ffn", type=int, default=256, help="width of the feed-forward network")
    p.add_argument(
        "--latent", action="store_true", help="latent attention of 512 + 64 channels (aqua and xquant cannot hold it)"
    )
    p.add_argument(
        "--arms",
        default=",".join(DEFAULT_ARMS),
        help="some of: " + ", ".join(ARMS) + "; or NAME=METHOD:key=value:key=value",
    )
    p.add_argument("--depths", default="1024,8192,32768", help="cached tokens before the measured ones")
    p.add_argument(
        "--tests",
        default="tg,pp",
        help="tg: generation, pp: prefill of --prompt tokens (at the depths of --prompt-depths)",
    )
    p.add_argument("--prompt-depths", default="8192")
    p.add_argument("--prompt", type=int, default=2048)
    p.add_argument("--gen", type=int, default=8, help="tokens of a turn")
    p.add_argument("--threads", "-t", type=int, default=2)
    p.add_argument("--pool", action="store_true", help="upstream's arms in a pool of threads, as in its programs")
    p.add_argument(
        "--cpu-time",
        action="store_true",
        help="with -t 1: seconds of the processor, so that what else runs on the machine counts less",
    )
    p.add_argument("--rounds", type=int, help="turns of every arm in generation (default: 5, with --overhead 40)")
    p.add_argument("--prompt-rounds", type=int, help="turns of every arm in prefill (default: 3, with --overhead 9)")
    p.add_argument("--json", help="append the JSON lines here (default: stdout)")
    p.add_argument(
        "--overhead",
        action="store_true",
        help="what zipcache and minikv cost by watching attention; sets --arms, --tests and the depths",
    )
    p.add_argument("--quick", action="store_true", help="seconds instead of minutes: does it run, not how fast")
    return p


def options() -> tuple[argparse.Namespace, Path]:
    """The command line, and the model that it names or that is made now."""
    p = parser()
    a = p.parse_args()
    a.rounds, a.prompt_rounds = a.rounds or (40 if a.overhead else 5), a.prompt_rounds or (9 if a.overhead else 3)
    if a.overhead:
        for spec in dict.fromkeys(x for pair in OVERHEAD.values() for x in pair[:2]):
            method, _, opts = spec.partition(":")
            ARMS[spec] = (None, method, opts.replace(":", ","))
        a.arms, a.tests, a.depths, a.prompt_depths = (
            ",".join(dict.fromkeys(x for pair in OVERHEAD.values() for x in pair[:2])),
            "pp,tg",
            "3500",
            "0",
        )
        a.cpu_time = a.threads == 1
    if a.quick:
        a.depths, a.prompt_depths, a.prompt, a.gen, a.rounds, a.prompt_rounds = (
            "512",
            "0" if a.overhead else "512",
            64,
            2,
            1,
            1,
        )

    if a.cpu_time and a.threads != 1:
        p.error(f"--cpu-time with {a.threads} threads counts those that wait too; add -t 1")
    if a.cpu_time:
        Arm.clock = staticmethod(time.process_time)
    a.default_arms = DEFAULT_ARMS if a.arms == ",".join(DEFAULT_ARMS) else []
    a.arms = [x.strip() for x in a.arms.split(",")]
    for i, x in enumerate(a.arms):
        if x not in ARMS and "=" in x:
            name, _, spec = x.partition("=")
            method, _, opts = spec.partition(":")
            ARMS[name] = (None, method, opts.replace(":", ","))
            a.arms[i] = name
        elif x not in ARMS:
            p.error(f"no arm '{x}': it is one of {', '.join(ARMS)}, or NAME=METHOD:key=value")
    shape = f"{a.heads}-latent" if a.latent else f"{a.heads}x{a.kv_heads}x{a.head_size}"
    width = "" if (a.embed, a.ffn) == (128, 256) else f"-{a.embed}-{a.ffn}"
    if a.latent and a.embed != LATENT_EMBED:
        p.error(f"--embed {a.embed} with --latent: that model has {LATENT_EMBED}")
    if a.embed % 32 or a.ffn % 32 or min(a.embed, a.ffn, a.layers) < 1:
        p.error(f"--layers {a.layers} --embed {a.embed} --ffn {a.ffn}: at least one layer, widths in multiples of 32")
    path = a.model or Path(a.cache_dir) / f"random-{a.layers}x{shape}{width}.gguf"
    if a.latent:
        a.arms = [x for x in a.arms if ARMS[x][1] not in ("aqua", "xquant") or x not in a.default_arms]
    if not path.is_file():
        if a.model:
            p.error(f"{path} is not a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        if a.latent:
            make_latent_model(part, a.heads, a.layers, a.ffn)
        else:
            make_model(part, a)
        part.rename(path)

    if not a.model and not a.kv_config and not a.latent:
        a.kv_config = path.with_suffix(".kvq.gguf")
        if not a.kv_config.is_file():
            make_means(path, a.kv_config, a.layers, a.kv_heads * a.head_size)
    if a.model and not a.kv_config:  # it may hold the data itself
        a.arms = [x for x in a.arms if ARMS[x][1] != "aqua" or x not in a.default_arms]
    return a, path


def print_table(rows: list[dict[str, Any]], peak: float) -> None:
    width = max(14, *(len(r["arm"]) for r in rows))
    print(
        f"\n{'test':8} {'depth':>6}  {'cache':{width}} {'t/s':>9} {'ratio':>7} {'least ms':>9} {'worst ms':>9}"
        f" {'cache GB/s':>11} {'of memory':>10}"
    )
    for r in rows:
        rate = r["cache_bytes_per_second"]
        more = (
            f"{r['step_ms_least']:9.2f} {r['step_ms_worst']:9.2f} {rate / 1e9:11.2f} {rate / peak:10.1%}"
            if rate
            else ""
        )
        print(
            f"{r['test']:8} {r['depth']:6}  {r['arm']:{width}} {r['tokens_per_second']:9.2f} {r['against_first']:6.2f}x"
            f" {more}"
        )


def main() -> None:
    a, path = options()
    Arm.threads = a.threads if a.pool else 0
    if a.overhead:
        Arm.shared = Model(path, kv_method="f16", n_ctx=256, n_threads=a.threads)
    command = shlex.join([sys.executable, *sys.argv])
    peak = bandwidth(a.threads, 64 if a.quick else 512)
    print(f"{command}\nmemory: {peak / 1e9:.1f} GB/s (add, {a.threads} threads)\n")
    nb_token = f16_bytes(path)
    out = open(a.json, "a") if a.json else sys.stdout
    rows = []
    for test in a.tests.split(","):
        for depth in (int(d) for d in (a.depths if test == "tg" else a.prompt_depths).split(",")):
            found = measure(a, test, depth, path)
            base = statistics.median(found[a.arms[0]]["rates"])
            for name, f in found.items():
                median = statistics.median(f["rates"])
                row = {
                    "arm": name,
                    "test": f"{test}{a.gen if test == 'tg' else a.prompt}",
                    "depth": depth,
                    "tokens_per_second": round(median, 3),
                    "against_first": round(median / base, 3),
                    "samples": [round(x, 3) for x in f["rates"]],
                    "step_ms_least": round(1e3 * min(f["steps"]), 3) if f["steps"] else None,
                    "step_ms_worst": round(1e3 * max(f["steps"]), 3) if f["steps"] else None,
                    "cache_ratio": round(f["cache_ratio"], 4),
                    "cache_bytes_per_second": median * depth * nb_token * f["cache_ratio"] if test == "tg" else None,
                    "memory_bytes_per_second": peak,
                    "threads": a.threads,
                    "model": path.name,
                    "command": command,
                }
                print(json.dumps(row), file=out, flush=True)
                rows.append(row)
    print_table(rows, peak)
    if a.overhead:
        print_overhead(rows)


if __name__ == "__main__":
    main()
