#!/usr/bin/env python3
"""Measure every row of the pretrained models' tables: results/real-MODEL.jsonl.

    python scripts/real_models.py --text heldout_a.txt                        windows of 2048 (Gemma: 4096) tokens
    python scripts/real_models.py qwen2.5-coder --text heldout_a.txt --long 16384 --long 32768
    python scripts/real_models.py smollm2 qwen2.5-coder --tasks               retrieval and tool calls

It is `ggml-kvq eval` with the caches below, so rows that exist are not measured again. A source tree is enough, with
PYTHONPATH=python, KVQ_LIB_DIR=<upstream's libraries> and KVQ_BACKEND=<libggml-kvq.so>. Where these are built with CUDA
everything runs on the GPU. Models are those of `ggml-kvq fetch`: from --model-dir, known by their SHA-256 under any
name, else from the cache folder. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

from ggml_kvq import cli, cpus, named  # noqa: E402
from ggml_kvq.errors import KvqError  # noqa: E402

AT = 131072  # tokens at which bits count
CACHES = (
    "f16",
    "floor=method:f16",
    "upstream:q8_0",
    "upstream:q4_0",
    "q4_0-sim=simulated:q4_0,window=64,sinks=4",
    "kivi-4=kivi:bits=4",
    "kivi-2-g32=kivi:bits=2,group=32",
    "kivi-2-g128=kivi:bits=2,group=128",
    "higgs-4=higgs:bits=4",
    "higgs-2=higgs:bits=2",
    "zipcache-60=zipcache",
    "minikv-50=minikv",
    "xquant-1.38=xquant:preset=1.38",
    "aqua-bias=aqua:predictor=bias@measured",
    *(  # what a GPU goes without, wherever they are measured
        f"auto-{bits}=auto:bits={bits},at={AT},coordinates=off" for bits in ("4.25", "3.5", "2.75", "2.25", "1.75")
    ),
    f"auto-2.25-alone=auto:bits=2.25,at={AT}@none",
    f"auto-2.4-predictors=auto:bits=2.4,at={AT},predictors=on",  # on a CPU
    *(  # what a CPU takes by itself
        f"auto-{bits}-coordinates=auto:bits={bits},at={AT},coordinates=on"
        for bits in ("4.25", "3.5", "2.75", "2.4", "2.25", "1.8", "1.75")
    ),
    "specache-2=specache:bits=2,top=64,prompt=near",
)
TASK_CACHES = (
    *("f16", "q8_0", "q4_0", "kivi-4", "auto-4.25", "auto-2.75", "auto-2.25", "specache-2"),
    *(f"auto-{bits}-coordinates" for bits in ("2.75", "2.25", "1.8")),
)
TASKS = ("multineedle", "kv", "tools")
LENGTHS = (2000, 4000, 8000)
SAMPLES = 30


@dataclass(frozen=True)
class Text:
    """Windows of a model on the text. Gemma's layers with a window of 512 tokens want longer ones."""

    n_ctx: int
    n_ubatch: int
    chunks: int


TEXTS = {
    "smollm2": Text(2048, 128, 3),
    "gemma3": Text(4096, 128, 3),
    "qwen2.5-coder": Text(2048, 128, 3),
    "qwen2.5-coder-1.5b": Text(2048, 128, 3),
}


def label(cache: str) -> str:
    """A cache's name in the tables."""
    return cache.partition("=")[0] if "=" in cache.partition(":")[0] else cache.rpartition(":")[2]


def chosen(names: list[str], known: tuple[str, ...]) -> list[str]:
    """The caches of these names, all when none is given. KvqError."""
    by = {label(cache): cache for cache in known}
    for name in names:
        if name not in by:
            raise KvqError(f"--only {name} is no row of the table; choose from {', '.join(by)}")
    return [by[name] for name in names] or list(known)


def find(model: named.Named, folder: Path | None) -> Path:
    """The model's file, checked. KvqError."""
    if folder is None:
        if model.is_there():
            return model.path()
        raise KvqError(f"{model.path()} is not there; run: ggml-kvq fetch {model.name}, or give --model-dir")
    for path in sorted(folder.glob("*.gguf")):
        if path.stat().st_size == model.size and named.sha256(path) == model.sha256:
            return path
    raise KvqError(f"no .gguf file in {folder} is {model.file} (SHA-256 {model.sha256}); fetch it, or copy it there")


def evaluate(path: Path, out: Path, caches: list[str], flags: list[str]) -> int:
    """`ggml-kvq eval` of these caches. Where one of them breaks, the others get a run of their own."""

    def run(some: list[str]) -> int:
        return cli.main(["eval", "-m", str(path), "-o", str(out), *flags, *[x for c in some for x in ("--cache", c)]])

    code = run(caches)
    return max(run([c]) for c in caches) if code == 2 and len(caches) > 1 else code


def on_text(args: argparse.Namespace, text: Text) -> list[str]:
    """eval's flags of a text."""
    chunks = args.chunks or text.chunks
    size = ["-c", str(text.n_ctx), "-ub", str(text.n_ubatch), "--chunks", str(chunks)]
    return ["-f", str(args.text), *size, "--bits-at", str(AT)]


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(TEXTS)} (default: all)")
    p.add_argument("--text", type=Path, help="text that no model and no calibration has seen")
    p.add_argument("--model-dir", type=Path, help="folder of the models' files (default: the cache folder)")
    p.add_argument("--out-dir", type=Path, default=ROOT / "results", help="folder of the rows (default: results)")
    p.add_argument("--long", type=int, action="append", default=[], metavar="N", help="one window of N tokens, -ub 512")
    p.add_argument("--tasks", action="store_true", help="retrieval instead of the text")
    p.add_argument("--only", action="append", default=[], metavar="ROW", help="this row of the table; repeatable")
    p.add_argument("--chunks", type=int, default=0, help="so many windows (default: the table's three)")
    p.add_argument("-t", "--threads", type=int, default=cpus.available(), help="CPU threads (default: all)")
    args = p.parse_args()
    for name in args.models:
        if name not in TEXTS:
            p.error(f"MODEL {name} is unknown; choose from {', '.join(TEXTS)}")
    if not args.tasks and args.text is None:
        p.error("--text is missing; give a text file, or --tasks")
    return args


def measure(args: argparse.Namespace, name: str, path: Path) -> int:
    """All that was asked for of one model."""
    out, common = args.out_dir / f"real-{name}.jsonl", ["--no-swa-full", "-t", str(args.threads), "--markdown"]
    known = CACHES if not args.tasks else tuple(c for c in CACHES if label(c) in TASK_CACHES)
    caches = chosen(args.only, known)
    if args.tasks:
        lengths = ",".join(map(str, LENGTHS))
        size = ["--tasks", ",".join(TASKS), "--lengths", lengths, "--samples", str(SAMPLES), "--chat", "-ub", "512"]
        return evaluate(path, out, caches, [*common, *size])
    texts = [Text(n, 512, 1) for n in args.long] or [TEXTS[name]]
    return max(evaluate(path, out, caches, [*common, *on_text(args, text)]) for text in texts)


def main() -> int:
    args = parse()
    status = 0
    args.out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.models or TEXTS:
            try:
                model = named.find(name)
                link = Path(scratch) / model.file  # rows name the model's own file
                link.symlink_to(find(model, args.model_dir).resolve())
                status = max(status, measure(args, name, link))
            except KvqError as e:
                print(f"real_models: {e}", file=sys.stderr)
                status = 2
            if status > 127:  # Ctrl-C
                break
    return status


if __name__ == "__main__":
    sys.exit(main())
