"""`ggml-kvq info -m FILE`: what a GGUF holds and what its cache takes under each method."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from typing import Any

from . import _sizes as sizes

MIB = 1 << 20
SHOWN = 8  # longest array of metadata that is printed
LONGEST = 80  # characters of a text of metadata


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser("info", help="show what a GGUF holds and what its KV cache takes under each method")
    what = "a GGUF model, hf:owner/repo/file.gguf, or a sidecar of calibrated data"
    parser.add_argument("file", metavar="FILE", nargs="?", help=what)
    parser.add_argument("-m", "--model", dest="model", metavar="FILE", help="the same, as for all other commands")
    parser.add_argument(
        "--cache",
        action="append",
        default=[],
        metavar="SPEC",
        help="plan this cache, as for ggml-kvq eval (kivi:bits=2,group=64), but not simulated:...; repeatable",
    )
    parser.add_argument(
        "-c",
        "--ctx-size",
        type=sizes.tokens,
        metavar="N",
        help="context length in tokens, 32k is 32768 (default: the model's own)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .. import gguf_header, hub, info, memory
    from ..calibrate import tune
    from ..errors import KvqError, MethodError
    from ..evaluate.specs import parse_built

    if (args.file is None) == (args.model is None):
        raise KvqError(
            f"FILE and -m {args.model} are both given; name one file" if args.model else "no FILE; give -m MODEL.gguf"
        )
    args.file = args.file or args.model
    specs = [parse_built(text, "layout") for text in args.cache]
    for spec in specs:
        spec.check()
    header = gguf_header.read(hub.resolve(args.file), tensors=True)
    header.check_whole()
    facts = info.summary(header)
    n_ctx = args.ctx_size or facts.get("context") or 4096
    if not 0 < n_ctx <= memory.MOST:
        raise MethodError(f"--ctx-size {n_ctx} is outside 1..{memory.MOST} tokens; choose a number in it")
    plans = info.plans(header, n_ctx, specs) if "attention_layers" in facts else []
    if specs and not plans:
        raise MethodError(
            f"{args.file} describes no attention layers, --cache {specs[0].text} has nothing to plan: give the model"
        )
    layers = memory.facts(header) if plans else sidecar_layers(header)
    stored = info.stored_plan(header, layers, n_ctx) if layers else None
    frontier = tune.frontier_of(header.kvq())
    if args.json:
        kvq = {key: shown(value) for key, value in header.kvq().items()}
        out = {**facts, "kvq": kvq, "n_ctx": n_ctx, "methods": [dataclasses.asdict(p) for p in plans]}
        out["frontier"] = [{"bits": bits, "kld": kld} for bits, kld in frontier]
        out["stored"] = dataclasses.asdict(stored) if stored else None
        print(json.dumps(out, indent=2))
        return 0
    print_facts(facts)
    if stored:
        print_stored(stored, n_ctx)
    if frontier:
        print_frontier(frontier, header.kvq().get("kvq.auto.text", "a text"))
    print_metadata(header.kvq())
    if facts.get("architecture") in gguf_header.WITHOUT_CACHE:
        print(f"{'KV cache':<17} none: llama.cpp keeps none for this architecture")
    elif not header.kvq():
        print(f"{'kvq.*':<17} none: --kv-method chooses, options have their defaults")
    if plans:
        print_plans(plans, n_ctx, bool(specs))
        if any(p.measures for p in plans):
            print(
                "\nauto: the first use of this model measures it, which may change these figures by 2 %. From then on"
                " this table counts what was found."
            )
        if layers and layers.windowed:
            print(
                f"\n{len(layers.windowed)} of {len(layers.full) + len(layers.windowed)} layers see a window of"
                f" {layers.window} tokens. They are counted whole, as Model and --swa-full keep them; other programs of"
                " llama.cpp keep the window and a batch."
            )
    return 0


def shown(value: Any) -> Any:
    """Metadata as it is, a long array as its length."""
    if isinstance(value, list) and len(value) > SHOWN:
        return f"[{len(value)} values]"
    return value if isinstance(value, str | int | float | bool | list) else str(value)


def print_stored(stored: Any, n_ctx: int) -> None:
    """What the file itself chooses."""
    text = (
        f"refused: {stored.refused}"
        if stored.refused
        else f"{stored.bits:.2f} true bits (K {stored.bits_k:.2f}, V {stored.bits_v:.2f})"
    )
    print(
        f"\nthis file chooses {stored.method}: {text} at {n_ctx} tokens, {stored.bytes_total / MIB:.2f} MiB"
        f"{far_words(stored)}\n"
    )


def print_frontier(frontier: Any, text: str) -> None:
    print(f"\nmethod auto, tuned on {text}: divergence from f16, nats a token\n")
    print("bits       " + " ".join(f"{bits:>7.2f}" for bits, _ in frontier) + "   at 131072 tokens")
    print("divergence " + " ".join(f"{kld:>7.4f}" for _, kld in frontier) + "\n")


def print_metadata(kvq: dict[str, Any]) -> None:
    """kvq.* of the file; what it holds for each layer is one line a kind, --json has the numbers."""
    layers: dict[str, list[int]] = {}
    for key, value in kvq.items():
        if found := re.fullmatch(r"(kvq\.\w+\.blk\.)(\d+)(\..+)", key):
            layers.setdefault(f"{found[1]}N{found[3]}", []).append(int(found[2]))
        else:
            text = str(shown(value))
            print(f"{key:<17} {text if len(text) <= LONGEST else text[:LONGEST] + ' ... (--json has all)'}")
    for key, numbers in layers.items():
        print(f"{key:<17} of {len(numbers)} layers, {min(numbers)} to {max(numbers)} (--json has the numbers)")


def sidecar_layers(header: Any) -> Any:
    """Layers that a sidecar describes, as if each had KV heads of 64 or 128 channels; None when it does not say."""
    from .. import memory

    kvq = header.kvq()
    n, k, v = (kvq.get(f"kvq.model.{key}") for key in ("n_layer", "n_embd_k_gqa", "n_embd_v_gqa"))
    if not n or not k or k != v:
        return None
    size = 128 if k % 128 == 0 and k >= 512 else 64 if k % 64 == 0 else 0
    shapes = [(il, k // size, size, size) for il in range(n)] if size else []
    return memory.Model(0, shapes, [], 0, n, False, 0) if shapes else None


def span(values: list[int]) -> str:
    return str(values[0]) if len(values) == 1 else ", ".join(map(str, values)) + " (by layer)"


def print_facts(facts: dict[str, Any]) -> None:
    print(f"{'file':<17} {facts['file']} ({facts['size'] / MIB:.1f} MiB, {facts['tensors']} tensors)")
    for key in ("type", "name", "architecture", "layers", "attention_layers", "heads", "context"):
        if key in facts and not (key == "attention_layers" and facts[key] == facts.get("layers")):
            print(f"{key.replace('_', ' '):<17} {facts[key]}")
    if "kv_heads" in facts:
        print(f"{'KV heads':<17} {span(facts['kv_heads'])}")
        print(f"{'head size':<17} K {span(facts['head_size_k'])}, V {span(facts['head_size_v'])}")
        print(f"{'KV width':<17} K {span(facts['k_width'])}, V {span(facts['v_width'])} values per token and layer")


def print_plans(plans: list[Any], n_ctx: int, chosen: bool) -> None:
    from .. import memory

    what = "" if chosen else ", default options"
    made = memory.cells(n_ctx)
    what = (f", for which llama.cpp makes {made} cells" if made != n_ctx else "") + what
    print(
        f"\nKV cache of one stream of {n_ctx} tokens{what}. True bits: all bytes allocated, over the values of the f16"
        " cache.\n"
    )
    width = max(10, *(len(p.method) for p in plans))
    print(
        f"{'method':<{width}} {'bits':>6} {'K':>6} {'V':>6} {'MiB':>10} {'f16 MiB':>10} {'MiB per 1k':>11}"
        f" {'f16 / it':>9}"
    )
    for p in plans:
        if p.refused:
            print(f"{p.method:<{width}} refused: {p.refused}")
            continue
        per_1k = p.bytes_total / n_ctx * 1024 / MIB
        print(
            f"{p.method:<{width}} {p.bits:6.2f} {p.bits_k:6.2f} {p.bits_v:6.2f} {p.bytes_total / MIB:10.2f}"
            f" {p.bytes_f16 / MIB:10.2f} {per_1k:11.3f} {p.bytes_f16 / p.bytes_total:8.2f}x{far_words(p)}"
        )


def far_words(p: Any) -> str:
    """The second tier, where there is one."""
    if not p.bytes_far:
        return ""
    return f"  and {p.bytes_far / MIB:.2f} MiB far ({16 * p.bytes_far / p.bytes_f16:.2f} bits)"
