#!/usr/bin/env python3
"""Speed of caches on one GPU, upstream's and ours, on a random 8B-shaped Q4_0 model. Builds nothing.

    scripts/bench_cuda.py --bench build/bench_depth --lib build/lib [--kernels build/kernels/test_cuda] [--depths 1024
    32768 131072]
    scripts/bench_cuda.py --bench build/bench_depth --lib build/lib --shapes 32/8x128 24/4x256 hybrid:16/4x256
    scripts/bench_cuda.py --batch build/bench_batch --lib build/lib [--loads drafts sequences mixed] [--rounds 3]
    scripts/bench_cuda.py --bench build/bench_depth --lib build/lib --cards 2 --split tensor
    scripts/bench_cuda.py --bench build/bench_depth --lib build/lib --place host --only f16 kivi-2 --depths 8192
    scripts/bench_cuda.py --bench build/bench_depth --lib build/lib --cpu-layers 17 --depths 8192 32768

A shape is query heads / KV heads x channels of a head, of a Llama; with hybrid: every fourth layer is attention and
the others are short convolutions (LFM2). Width, feed-forward width and layers stay those of the 8B shape.

Prints the kernels' own table (time of one layer's attention, floor = bytes / measured copy bandwidth) and then
tokens/s. With --memory also what the device's free memory fell by beside the load line: KV cache, llama.cpp's compute
buffer, and the workspace that the line promises at most. What is left over is what upstream's own cache leaves over as
well (cuBLAS, CUDA graphs); 5 % more fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

LAYERS, WIDTH, FFN, VOCAB, INTERVAL = 32, 4096, 14336, 32000, 4  # INTERVAL: of attention layers in hybrid models
CACHES = [
    ("upstream f16", "CUDA0", "f16", "", ""),
    ("upstream q8_0", "CUDA0", "q8_0", "", ""),
    ("upstream q4_0", "CUDA0", "q4_0", "", ""),
    ("kvq f16", "KVQ0", "f16", "f16", ""),
    ("kivi-2 g128", "KVQ0", "f16", "kivi", "bits=2,group=128"),
    ("kivi-2 g32", "KVQ0", "f16", "kivi", "bits=2"),
    ("kivi-2 g16", "KVQ0", "f16", "kivi", "bits=2,group=16"),
    ("kivi-4 g128", "KVQ0", "f16", "kivi", "bits=4,group=128"),
    ("kivi-4 g32", "KVQ0", "f16", "kivi", "bits=4"),
    ("xquant 1.38", "KVQ0", "f16", "xquant", ""),
    ("higgs-2", "KVQ0", "f16", "higgs", "bits=2"),
    ("higgs-4", "KVQ0", "f16", "higgs", "bits=4"),
    ("aqua-2 bias", "KVQ0", "f16", "aqua", "bits=2,predictor=bias"),
    ("aqua-2 k", "KVQ0", "f16", "aqua", "bits=2,predictor=k,weights=8"),
    ("aqua-2 full", "KVQ0", "f16", "aqua", "bits=2,predictor=full,weights=8"),
    ("aqua-2 fold", "KVQ0", "f16", "aqua", "bits=2,predictor=fold,weights=8"),
    ("zipcache-60", "KVQ0", "f16", "zipcache", ""),
    ("zipcache blind", "KVQ0", "f16", "zipcache", ""),
    ("specache", "KVQ0", "f16", "specache", ""),
    ("specache-2 g128", "KVQ0", "f16", "specache", "near=kivi,group=128"),
    ("specache-1", "KVQ0", "f16", "specache", "bits=1,top=128"),
    ("minikv-50", "KVQ0", "f16", "minikv", ""),
    ("auto-1.75", "KVQ0", "f16", "auto", "bits=1.75"),
    ("auto-2.25", "KVQ0", "f16", "auto", "bits=2.25"),
    ("auto-2.75", "KVQ0", "f16", "auto", "bits=2.75"),
    ("auto-3.5", "KVQ0", "f16", "auto", "bits=3.5"),
    ("auto-4.25", "KVQ0", "f16", "auto", "bits=4.25"),
    ("auto-2.25 coordinates", "KVQ0", "f16", "auto", "bits=2.25,coordinates=on"),
    ("auto-1.75 coordinates", "KVQ0", "f16", "auto", "bits=1.75,coordinates=on"),
    ("auto-2.25 alone", "KVQ0", "f16", "auto", "bits=2.25,means=off"),  # as of a model without data
]
PLACED = ("kivi", "xquant", "higgs", "aqua", "zipcache", "minikv", "auto")  # option place is that of sealed blocks
MEANS = ("aqua", "auto")  # methods that take calibrated means
COORDS = 10  # a head's share of a layer's coordinates
# Many sequences and drafts: arguments of bench_batch behind MODEL and DEVICE.
LOADS = {
    "drafts": [
        ("1 x 8k", "32 1x8192"),
        *((f"1 x 8k, {n} tokens each", f"32 1x8192 each={n}") for n in (2, 4, 8)),
        ("8 x 8k, 4 tokens each", "16 8x8192 each=4 shared"),
    ],
    "sequences": [("32 x 8k", "48 32x8192 shared")],
    "mixed": [("1 x 100k, 31 x 1k", "32 1x100000,31x1024 unified shared")],
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Heads of a model."""

    text: str
    heads: int
    heads_kv: int
    head_size: int
    hybrid: bool
    layers: int = LAYERS

    def attends(self, layer: int) -> bool:
        """Is this layer attention?"""
        return not self.hybrid or layer % INTERVAL == INTERVAL - 1


def shape_of(text: str) -> Shape:
    """[hybrid:]HEADS/KV_HEADSxHEAD_SIZE; raises ArgumentTypeError."""
    match = re.fullmatch(r"(hybrid:)?(\d+)/(\d+)x(\d+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"no shape: {text}; write it as 24/4x256 or hybrid:16/4x256")
    shape = Shape(text, int(match[2]), int(match[3]), int(match[4]), bool(match[1]))
    if shape.heads % shape.heads_kv or (shape.hybrid and shape.heads * shape.head_size != WIDTH):
        raise argparse.ArgumentTypeError(
            f"{text}: KV heads must divide query heads, whose channels must make {WIDTH} in a hybrid model"
        )
    return shape


def write_model(path: Path, shape: Shape) -> None:
    """Random weights of the right shapes: Q4_0 blocks of 18 bytes (f16 scale, 32 nibbles), f32 norms. Tensors share
    their random bytes.
    """
    import gguf

    rng = np.random.default_rng(1)
    arch = "lfm2" if shape.hybrid else "llama"
    w = gguf.GGUFWriter(str(path), arch)
    w.add_block_count(shape.layers)
    w.add_context_length(1 << 18)
    w.add_embedding_length(WIDTH)
    w.add_feed_forward_length(FFN)
    w.add_head_count(shape.heads)
    w.add_head_count_kv(
        [shape.heads_kv if shape.attends(i) else 0 for i in range(shape.layers)] if shape.hybrid else shape.heads_kv
    )
    w.add_key_length(shape.head_size)
    w.add_value_length(shape.head_size)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_dimension_count(shape.head_size)
    w.add_rope_freq_base(500000.0)
    w.add_vocab_size(VOCAB)
    w.add_tokenizer_model("none")
    if shape.hybrid:
        w.add_uint32("lfm2.shortconv.l_cache", 3)
    blocks = rng.integers(0, 256, (max(FFN, VOCAB, 3 * WIDTH) * WIDTH // 32, 18), dtype=np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(0.006).tobytes(), dtype=np.uint8)

    def q4(name: str, rows: int, columns: int) -> None:
        data = blocks[: rows * columns // 32].reshape(rows, -1)
        w.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def ones(name: str, n: int) -> None:
        w.add_tensor(name, np.ones(n, np.float32))

    q, kv = shape.heads * shape.head_size, shape.heads_kv * shape.head_size
    q4("token_embd.weight", VOCAB, WIDTH)
    q4("output.weight", VOCAB, WIDTH)
    ones("token_embd_norm.weight" if shape.hybrid else "output_norm.weight", WIDTH)
    for i in range(shape.layers):
        parts = [("ffn_gate", FFN, WIDTH), ("ffn_up", FFN, WIDTH), ("ffn_down", WIDTH, FFN)]
        if shape.attends(i):
            parts += [("attn_q", q, WIDTH), ("attn_k", kv, WIDTH), ("attn_v", kv, WIDTH), ("attn_output", WIDTH, q)]
        else:
            parts += [("shortconv.in_proj", 3 * WIDTH, WIDTH), ("shortconv.out_proj", WIDTH, WIDTH)]
            w.add_tensor(f"blk.{i}.shortconv.conv.weight", rng.standard_normal((WIDTH, 3)).astype(np.float32))
        ones(f"blk.{i}.attn_norm.weight", WIDTH)
        ones(f"blk.{i}.ffn_norm.weight", WIDTH)
        if shape.hybrid and shape.attends(i):
            ones(f"blk.{i}.attn_q_norm.weight", shape.head_size)
            ones(f"blk.{i}.attn_k_norm.weight", shape.head_size)
        for name, rows, columns in parts:
            q4(f"blk.{i}.{name}.weight", rows, columns)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def write_sidecar(model: Path, path: Path, shape: Shape, predictors: bool, coords: bool) -> None:
    """Calibrated data for it: means, an order of keys' pairs with gains and, if asked for, predictors of random q4_0
    blocks that keep rows at about half their size, or random axes of coordinates.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
    from ggml_kvq.calibrate import files

    rng = np.random.default_rng(2)
    kv = shape.heads_kv * shape.head_size
    meta = {
        "kvq.version": files.VERSION,
        "kvq.method": "aqua",
        **files.identity(model),
        "kvq.aqua.predictor": "full" if predictors else "bias",
        "kvq.auto.pairs": "sorted",
        **({"kvq.auto.coords": COORDS} if coords else {}),
    }
    data: dict[str, np.ndarray] = {}
    for i in filter(shape.attends, range(shape.layers)):
        for name in "kv":
            data[f"kvq.aqua.blk.{i}.{name}.bias"] = rng.standard_normal(kv).astype(np.float32)
        pairs = [2 * rng.permutation(shape.head_size // 2) for _ in range(shape.heads_kv)]  # rotary: 2p, 2p + 1
        data[f"kvq.aqua.blk.{i}.k.order"] = np.asarray(np.concatenate(pairs).repeat(2) + np.arange(kv) % 2, np.float32)
        data[f"kvq.aqua.blk.{i}.k.gain"] = np.exp2(rng.uniform(-1, 1, kv // 2)).repeat(2).astype(np.float32)
        if coords:
            at, n = f"kvq.aqua.blk.{i}", COORDS * shape.heads_kv - 2
            for name in ("order", "gain"):
                data[f"{at}.k.left.{name}"] = data[f"{at}.k.{name}"]
            for name in ("k.axes", "k.read", "v.axes"):
                data[f"{at}.{name}"] = (rng.standard_normal((n, kv)) / kv**0.5).astype(np.float32)
        for name, inputs in (("k.weight", kv), ("v.weight", 2 * kv), ("v.fold", 2 * kv)):
            if i and predictors:
                blocks = rng.integers(0, 256, (kv, inputs // 32, 18), dtype=np.uint8)
                blocks[:, :, :2] = np.frombuffer(np.float16(0.1 / inputs**0.5).tobytes(), dtype=np.uint8)
                data[f"kvq.aqua.blk.{i}.{name}"] = blocks.reshape(kv, -1)
        if i and predictors:
            meta[f"kvq.aqua.blk.{i}.prev"] = i - 1
    files.write_sidecar(path, meta, data)


def program(text: str) -> Path:
    """A file that can be started from anywhere: "./x" alone would be looked for on PATH."""
    path = Path(text).resolve()
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is no file; build it as docs/performance-gpu.md says")
    return path


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bench", type=program, help="the program built from scripts/bench_depth.cpp")
    p.add_argument("--batch", type=program, help="the program built from scripts/bench_batch.cpp")
    p.add_argument("--loads", choices=list(LOADS), nargs="+", default=list(LOADS), help="what --batch runs")
    p.add_argument("--lib", type=Path, required=True, help="folder of libllama, libggml-cuda and libggml-kvq")
    p.add_argument("--kernels", type=program, help="the program built from tests/native/test_cuda.cpp")
    p.add_argument(
        "--model",
        type=Path,
        default=Path("random-8b-q4_0.gguf"),
        help="written when missing; with --shapes one beside it for each",
    )
    p.add_argument(
        "--shapes",
        type=shape_of,
        nargs="+",
        default=[shape_of("32/8x128")],
        help="heads/KV heads x head size, hybrid: before it",
    )
    p.add_argument("--depths", type=int, nargs="+", default=[1024, 32768, 131072])
    p.add_argument("--generate", type=int, default=64, help="tokens timed behind each depth")
    p.add_argument("--rounds", type=int, default=1, help="medians of so many runs of each, in turns")
    p.add_argument("--only", nargs="+", help="parts of cache names")
    p.add_argument("--memory", action="store_true", help="hold memory against the load line, at every depth")
    p.add_argument("--layers", type=int, default=LAYERS, help="fewer are quicker to load and to fill; ratios stay")
    p.add_argument("--keep", action="store_true", help="models of --shapes stay")
    p.add_argument("--cards", type=int, default=1, help="GPUs that share the model")
    p.add_argument("--split", choices=["layer", "tensor"], default="layer", help="how they share it (-sm)")
    p.add_argument(
        "--place", choices=["device", "host"], default="device", help="host: our blocks there; upstream with -nkvo"
    )
    p.add_argument(
        "--cpu-layers",
        type=int,
        default=0,
        metavar="N",
        help="the first N on the CPU: upstream's -ngl, our launcher's -ot",
    )
    p.add_argument("-t", "--threads", type=int, default=os.cpu_count(), help="of the CPU, with --cpu-layers")
    p.add_argument("--timeout", type=float, default=120)
    a = p.parse_args()
    if not (a.bench or a.batch or a.kernels):
        p.error("nothing to run: name --bench, --batch or --kernels")
    if a.kernels:
        subprocess.run([a.kernels, "bench"], check=True)
    chosen = [c for c in CACHES if not a.only or any(x in c[0] for x in a.only)]
    failed = False
    for shape in (dataclasses.replace(s, layers=a.layers) for s in a.shapes):
        model, sidecar = files_of(a, shape, chosen)
        if a.bench:
            failed |= bench_shape(a, shape, chosen, model, sidecar)
        if a.batch:
            bench_loads(a, shape, chosen, model, sidecar)
        if not a.keep and model != a.model:  # 4 GB each
            model.unlink()
            sidecar.unlink(missing_ok=True)
    if failed:
        sys.exit("memory is not as said")


Cache = tuple[str, str, str, str, str]  # a row of CACHES


def files_of(a: argparse.Namespace, shape: Shape, chosen: list[Cache]) -> tuple[Path, Path]:
    """Model of a shape and its calibrated data, written when missing."""
    usual = shape.text == "32/8x128" and shape.layers == LAYERS
    model: Path = (
        a.model if usual else a.model.with_name(f"{a.model.stem}-{re.sub('[:/]', '-', shape.text)}-{shape.layers}.gguf")
    )
    if not model.exists():
        write_model(model, shape)
    sidecar = model.with_suffix(".aqua.gguf")
    predicted = not shape.hybrid and any(c[3] == "aqua" and "bias" not in c[4] for c in chosen)
    coords = not shape.hybrid and not predicted and any("coordinates" in c[0] for c in chosen)
    if not sidecar.exists() and any(c[3] in MEANS for c in chosen):
        write_sidecar(model, sidecar, shape, predicted, coords)
    return model, sidecar


def devices_of(a: argparse.Namespace, device: str) -> str:
    """CUDA0 or KVQ0, and the same of the other cards, as the programs take it."""
    names = ",".join(f"{device.rstrip('0')}{i}" for i in range(a.cards))
    return names + (":tensor" if a.split == "tensor" else "")


def on_cpu(a: argparse.Namespace, ours: bool) -> str:
    """Argument of bench_depth that leaves the first layers to the CPU. Ours keeps their caches on the device."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
    from ggml_kvq import cpu_layers

    return f"ot={cpu_layers.weights_of(a.cpu_layers)}" if ours else f"ngl={a.layers + 1 - a.cpu_layers}"


def environment(a: argparse.Namespace, cache: Cache, model: Path, sidecar: Path) -> dict[str, str]:
    """What a program of llama.cpp reads to take this cache."""
    name, _, _, method, opts = cache
    if a.place == "host" and method in PLACED:
        opts = ",".join(filter(None, (opts, "place=host")))
    env = {**os.environ, "LD_LIBRARY_PATH": str(a.lib), "KVQ_MODEL": str(model)}
    if method:
        env["KVQ_CUDA_OBSERVE"] = "0" if "blind" in name else "1"  # nobody scores cells: what observation costs
        env |= {"GGML_BACKEND_PATH": str(a.lib / "libggml-kvq.so"), "KVQ_METHOD": method, "KVQ_OPTS": opts}
    if method in MEANS:
        env["KVQ_CONFIG"] = str(sidecar)
    return env


def bench_loads(a: argparse.Namespace, shape: Shape, chosen: list[Cache], model: Path, sidecar: Path) -> None:
    """Many sequences and drafts: tokens/s of all sequences together and ms of a step, medians of turns."""
    head = f"\n{shape.text}\n{'cache':<16}{'load':<24}{'t/s of all':>12}{'ms a step':>11}{'prompt t/s':>12}{'x f16':>8}"
    print(head, flush=True)
    for text, arguments in (x for load in a.loads for x in LOADS[load]):
        rounds: dict[str, list[list[float]]] = {}
        for _ in range(a.rounds):
            for cache in chosen:
                if cache[0] in rounds and not rounds[cache[0]]:  # it failed
                    continue
                command = [str(a.batch), str(model), devices_of(a, cache[1]), *arguments.split(), f"type={cache[2]}"]
                env = environment(a, cache, model, sidecar)
                found = rounds.setdefault(cache[0], [])
                try:
                    out = subprocess.run(command, env=env, capture_output=True, text=True, timeout=a.timeout)
                except subprocess.TimeoutExpired:
                    print(f"{cache[0]:<16}{text:<24}  longer than {a.timeout:.0f} s", flush=True)
                    continue
                fields = out.stdout.split()
                if out.returncode or len(fields) != 9:
                    print(f"{cache[0]:<16}{text:<24}  failed: {out.stderr.strip()[-300:]}", flush=True)
                    continue
                found.append([float(x) for x in fields])
        base = 0.0
        for name, runs in ((name, runs) for name, runs in rounds.items() if runs):
            _, _, prompt, _, speed, _, ms, _, _ = (statistics.median(column) for column in zip(*runs))
            base = speed if name == CACHES[0][0] else base
            ratio = f"{speed / base:.2f}" if base else "-"
            print(f"{name:<16}{text:<24}{speed:>12.1f}{ms:>11.3f}{prompt:>12.0f}{ratio:>8}", flush=True)


def bench_shape(a: argparse.Namespace, shape: Shape, chosen: list[Cache], model: Path, sidecar: Path) -> bool:
    """All depths of one model; was its memory other than its load line said?"""
    print(
        f"\n{shape.text}\n{'cache':<16}{'depth':>8}{'prompt t/s':>12}{'last 2048':>12}"
        f"{'generation t/s':>16}{'x f16':>8}{'prompt x f16':>14}{'ms a step':>11}{'longest':>12}",
        flush=True,
    )
    failed = False
    overhead = 0.0
    groups = [[d] for d in a.depths] if a.memory else [a.depths]  # a process goes from one depth to the next
    for depths in groups:
        rounds: dict[tuple[str, int], list[list[float]]] = {}
        base: dict[int, tuple[float, float]] = {}
        slow: set[str] = set()
        for turn in range(a.rounds):  # caches take turns: what changes with time meets all of them
            for name, device, cache_type, method, opts in chosen:
                if name in slow:  # upstream's attention over heads that it has no CUDA kernel for
                    continue
                env = environment(a, (name, device, cache_type, method, opts), model, sidecar)
                command = [str(a.bench), str(model), devices_of(a, device), ",".join(map(str, depths)), str(a.generate)]
                command += [cache_type, *(["nkvo"] if a.place == "host" and not method else [])]
                if a.cpu_layers:
                    command += [f"t={a.threads}", on_cpu(a, method not in ("", "f16"))]
                try:
                    out = subprocess.run(command, env=env, capture_output=True, text=True, timeout=a.timeout)
                except subprocess.TimeoutExpired:
                    print(f"{name:<16}  longer than {a.timeout:.0f} s", flush=True)
                    slow.add(name)
                    continue
                lines = [line.split() for line in out.stdout.splitlines()]
                if out.returncode or [len(fields) for fields in lines] != [9] * len(depths):
                    print(f"{name:<16}  failed: {out.stderr.strip()[-300:]}", flush=True)
                    continue
                for depth, fields in zip(depths, lines):
                    rounds.setdefault((name, depth), []).append([float(x) for x in fields[1:]])
                    if turn + 1 < a.rounds:
                        continue
                    prompt, last, speed, step, longest, used, kv, compute = (
                        statistics.median(column) for column in zip(*rounds[name, depth])
                    )
                    if name == CACHES[0][0]:
                        base[depth] = (speed, last)
                    ratios = [f"{x / y:.2f}" if y else "-" for x, y in zip((speed, last), base.get(depth, (0.0, 0.0)))]
                    speeds = f"{prompt:>12.0f}{last:>12.0f}{speed:>16.1f}"
                    steps = f"{step:>11.3f}{longest:>12.3f}"
                    print(f"{name:<16}{depth:>8}{speeds}{ratios[0]:>8}{ratios[1]:>14}{steps}", flush=True)
                    if a.memory:
                        line = re.search(r"take up to ([\d.]+) MiB more", out.stderr)
                        workspace = float(line[1]) if line else 0.0
                        if not method:
                            overhead = max(overhead, used - kv - compute)
                        said = kv + compute + workspace + (overhead if method else 0.0)
                        off = (used - said) / said if method else 0.0
                        failed |= abs(off) > 0.05
                        print(
                            f"    {used:.0f} MiB taken: KV cache {kv:.1f}, compute buffer {compute:.1f}, workspace"
                            f" {workspace:.1f}, the rest {used - kv - compute - workspace:.1f}"
                            + (f" ({100 * off:+.1f} % of what is said, with upstream's rest)" if method else ""),
                            flush=True,
                        )
    return failed


if __name__ == "__main__":
    main()
