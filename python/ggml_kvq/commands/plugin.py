"""`ggml-kvq plugin`: libggml-kvq.so for a program that brings its own llama.cpp."""

from __future__ import annotations

import argparse
import sys
from typing import Any

HELP = "use the library in a program with a llama.cpp of its own: two lines of environment, or a file beside it"


def register(subparsers: Any) -> None:
    """Add the `plugin` parser."""
    p = subparsers.add_parser("plugin", help=HELP, description=HELP)
    how = p.add_mutually_exclusive_group()
    how.add_argument(
        "--print-env", action="store_true", help="lines for a shell that is to start the program (default)"
    )
    how.add_argument("--install", metavar="DIR", help="put the library into this folder, which holds its libggml")
    how.add_argument("--remove", metavar="DIR", help="undo --install")
    p.add_argument("--method", default="kivi", help="for --print-env: default %(default)s")
    p.add_argument(
        "-m",
        "--model",
        metavar="FILE",
        help="measure this model's keys and values first, once: auto finds them in every program",
    )
    p.add_argument(
        "--predictors", action="store_true", help="with -m: fit predictors instead, which auto takes with predictors=on"
    )
    p.add_argument("-t", "--threads", type=int, help="for -m: default all CPUs that may be used")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 done; a folder that holds no such llama.cpp is refused, and a model that cannot be measured."""
    from .. import methods
    from ..errors import KvqError
    from ..launch import plugin

    if args.model:
        print(f"# measured: {plugin.measure(args.model, args.threads, args.predictors)}")
    elif args.predictors:
        raise KvqError("--predictors goes with -m MODEL, whose predictors are to be fitted; add that or drop it")
    if args.install:
        print("\n".join(plugin.install(args.install)))
    elif args.remove:
        print(f"removed {plugin.remove(args.remove)}")
    else:
        methods.check(args.method, "")
        print("\n".join(plugin.environment(args.method)))
        print(f"# {plugin.NEEDS}", file=sys.stderr)
    return 0
