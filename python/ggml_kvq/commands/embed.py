"""`ggml-kvq embed`: a copy of a model that carries calibrated data and names its method; unmodified llama.cpp still
loads it. With --card a model card stands beside it.
"""

from __future__ import annotations

import argparse
from typing import Any


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "embed", help="copy a model with calibrated data inside, so that it chooses its own method"
    )
    parser.add_argument("model", metavar="MODEL", help="GGUF model")
    parser.add_argument("sidecar", metavar="SIDECAR", help="what ggml-kvq calibrate wrote")
    parser.add_argument("output", metavar="OUTPUT", help="model file to write")
    parser.add_argument(
        "--card",
        metavar="ROWS.jsonl",
        help="write a model card, OUTPUT with .card.md for .gguf, from what ggml-kvq eval -o measured of MODEL",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUTPUT when it is there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from ..calibrate import files
    from ..errors import KvqError
    from ..files import keep_inputs, whole
    from ..progress import Line

    for what, path in (("model", args.model), ("sidecar", args.sidecar), ("--card", args.card)):
        if path and not Path(path).is_file():
            raise KvqError(f"{what} {path} is not a file; check the path")
    card, beside = None, Path(args.output).with_suffix(".card.md")
    keep_inputs(args.output, "OUTPUT", args.model, args.sidecar, args.card)
    if args.card:
        keep_inputs(beside, "the model card", args.model, args.sidecar, args.card)
    if Path(args.output).exists() and not args.overwrite:
        raise KvqError(f"{args.output} is there already; choose another name, or add --overwrite to replace it")
    if args.card:  # before gigabytes are copied
        from .. import cards
        from ..evaluate import results

        meta, _ = files.read_sidecar(args.sidecar)
        card = cards.card(args.model, args.sidecar, Path(args.output).name, meta, results.read(args.card))
    line = Line()
    files.embed(args.model, args.sidecar, args.output, line)
    line.clear()
    print(f"{args.output}: {args.model} with the data of {args.sidecar}")
    if card is not None:
        with whole(beside) as partial:
            partial.write_text(card, encoding="utf-8")
        print(f"{beside}: its model card")
    return 0
