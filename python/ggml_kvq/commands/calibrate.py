"""`ggml-kvq calibrate`: fit a method's data on a text and write it as a sidecar GGUF."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser("calibrate", help="fit the channel means that method aqua removes, and write them as a sidecar GGUF")
    parser.add_argument("-m", "--model", required=True, metavar="FILE", help="GGUF model")
    parser.add_argument("-f", "--file", required=True, metavar="TEXT", help="text of the kind the model will see")
    parser.add_argument("-o", "--output", metavar="FILE", help="sidecar to write (default: the model's name with .kvq.gguf)")
    parser.add_argument("--sequences", type=int, default=64, metavar="N", help="sequences to run (default 64)")
    parser.add_argument("--length", type=int, default=2048, metavar="N", help="tokens of a sequence (default 2048)")
    parser.add_argument("--sinks", type=int, default=4, metavar="N", help="first tokens of each sequence to leave out (default 4)")
    parser.add_argument("--seed", type=int, default=0, help="which sequences of the text (default 0)")
    parser.add_argument("-t", "--threads", type=int, metavar="N", help="CPU threads")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..calibrate import files, means
    from ..errors import KvqError

    model = Path(args.model)
    out = Path(args.output) if args.output else model.with_name(model.stem + ".kvq.gguf")
    if args.sequences < 1 or not 0 <= args.sinks < args.length:
        raise KvqError(f"--sequences {args.sequences} with --sinks {args.sinks} leaves no tokens; choose at least 1 and fewer sinks than --length")
    files._gguf()
    text = Path(args.file).read_text("utf-8", errors="replace")
    fitted = means.fit(
        model, text, n_sequences=args.sequences, length=args.length, sinks=args.sinks, seed=args.seed, n_threads=args.threads,
        checkpoint=str(out) + ".partial.npz", progress=True,
    )  # fmt: skip
    files.write_sidecar(out, files.fields(model, fitted, args.sinks), files.arrays(fitted))
    print(f"{'layer':>5} {'K energy in means':>18} {'V energy in means':>18}")
    for il, (k, v) in fitted.removed.items():
        print(f"{il:>5} {100 * k:>17.1f}% {100 * v:>17.1f}%")
    print(f"{out}: {fitted.n_tokens} tokens in {fitted.seconds:.0f} s, peak memory {fitted.peak_mib:.0f} MiB")
    return 0
