"""`ggml-kvq plan [-m MODEL] [--memory SIZE]`: which context fits, under each cache."""

from __future__ import annotations

import argparse
from typing import Any

from . import _sizes as sizes

HELP = "tell which context fits into a memory, under each cache"


def register(subparsers: Any) -> None:
    """Add the `plan` parser; its `run` default is the entry point."""
    p = subparsers.add_parser("plan", help=HELP, description=HELP + ". Nothing is loaded, nothing is run.")
    p.add_argument("-m", "--model", help="GGUF model, hf:owner/repo/file.gguf or a name (default: well-known shapes)")
    p.add_argument(
        "--memory",
        action="append",
        default=[],
        metavar="SIZE",
        help="as 8G, or 2x12G for two cards that share the layers; repeatable (default: 8G, 12G, 24G)",
    )
    p.add_argument("--large", action="store_true", help="shapes of 8B to 70B and one or two cards by default")
    p.add_argument(
        "--cache",
        action="append",
        default=[],
        metavar="SPEC",
        help="as for ggml-kvq eval (kivi:bits=4, upstream:q8_0), repeatable (default: llama.cpp's and auto's)",
    )
    p.add_argument(
        "--reserve",
        default="1G",
        metavar="SIZE",
        help="left for compute buffers, driver and display; an allowance, not a measurement (default 1G)",
    )
    p.add_argument(
        "-ub", "--ubatch-size", type=sizes.positive, default=512, metavar="N", help="tokens of a batch (default 512)"
    )
    p.add_argument("--markdown", action="store_true", help="print the table alone, as Markdown")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Entry point. All words are checked before anything is planned."""
    from pathlib import Path

    from .. import budget, hub
    from ..evaluate.specs import parse_built
    from ..launch import fits

    usual = fits.MEMORIES_OF_LARGE if args.large else fits.MEMORIES
    memories = [fits.memory_of(text) for text in args.memory or usual]
    reserve = 0 if args.reserve.strip() == "0" else budget.size(args.reserve, "--reserve")
    specs = [parse_built(text, "layout") for text in args.cache or fits.CACHES]
    for spec in specs:
        spec.check()
    known_shapes = fits.LARGE if args.large else fits.KNOWN
    models = [fits.of_file(Path(hub.resolve(args.model)))] if args.model else list(known_shapes)
    ub = args.ubatch_size
    print(fits.table(models, memories, specs, markdown=args.markdown, reserve=reserve, n_ubatch=ub))
    for known in models:
        for m in memories:
            if not args.markdown and not m.holds(known, reserve):
                print(
                    f"\n{known.name} does not fit into {m.text}: {budget.words(known.facts.weights)} of weights and"
                    f" --reserve {args.reserve}"
                )
    if not args.markdown:
        print(
            "\nTokens, k is 1024, rounded down; all: what the model was trained for; -: nothing fits."
            f"\nThe memory holds the weights, the cache, the attention mask of {ub} tokens, and for the rest --reserve"
            f" {args.reserve}:\n{fits.RESERVE_WORDS}. The reserve is an allowance, not a measurement."
        )
    return 0
