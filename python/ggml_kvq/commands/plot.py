"""`ggml-kvq plot`: figures from result files."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from . import _sizes as sizes

HELP = "draw the frontier, memory and speed figures from result files (PNG and SVG)"


def register(subparsers: Any) -> None:
    """Add the `plot` parser."""
    p = subparsers.add_parser("plot", help=HELP, description=HELP)
    p.add_argument(
        "kind",
        choices=("frontier", "memory", "speed"),
        help="frontier: damage against true bits; memory: size against context; speed: tokens/s against depth",
    )
    p.add_argument(
        "files", nargs="*", help="result files (.jsonl) of ggml-kvq eval, ggml-kvq bench or llama-bench -o jsonl"
    )
    p.add_argument("-o", "--output", help="path without suffix (default: the figure's name)")
    p.add_argument("--title", default="", help="title of the figure")
    p.add_argument("--caches", default="", help="comma list: only these caches, in this order")
    p.add_argument("-m", "--model", help="memory: the model whose layers are planned")
    p.add_argument(
        "--cache",
        action="append",
        default=[],
        metavar="SPEC",
        help="memory: a cache, as for ggml-kvq eval, but not simulated:...; repeatable",
    )
    p.add_argument(
        "--lengths",
        type=sizes.token_list,
        default=[2048, 8192, 32768, 131072],
        help="memory: context lengths in tokens",
    )
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draw one figure and print the two paths."""
    from .. import hub, plotting, report
    from ..errors import KvqError
    from ..evaluate import results, specs

    rows = [row for path in args.files for row in results.read(path)]
    if args.kind == "frontier":
        rows = results.shown(rows, lambda line: print(f"ggml-kvq plot: {line}", file=sys.stderr))
    if args.kind == "memory":
        if not args.model or not args.cache:
            raise KvqError("plot memory needs -m MODEL and at least one --cache SPEC")
        caches = [specs.parse_built(text, "layout") for text in args.cache]
        rows += plotting.memory_rows(hub.resolve(args.model), caches, args.lengths)
    elif not rows:
        raise KvqError(
            f"plot {args.kind} needs result files; run ggml-kvq {'bench' if args.kind == 'speed' else 'eval'} first"
        )
    if args.kind != "speed":
        rows = [r for r in rows if "key" in r]
    if args.caches:
        wanted = args.caches.split(",")
        rows = [r for name in wanted for r in rows if (r["key"]["cache"] if "key" in r else r.get("cache")) == name]
    if args.kind == "frontier":
        n = len(report.groups([r for r in rows if r["key"]["kind"] == "text" and "kld_mean" in r]))
        if n > 1:
            print(
                f"ggml-kvq plot: rows of {n} windows, texts or models are drawn in one figure, under the name of the"
                " first; ggml-kvq report draws each apart",
                file=sys.stderr,
            )
    draw = {"frontier": plotting.frontier, "memory": plotting.memory, "speed": plotting.speed}[args.kind]
    for path in draw(rows, args.output or args.kind, title=args.title):
        print(path)
    return 0
