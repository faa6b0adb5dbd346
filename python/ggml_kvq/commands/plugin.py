"""`ggml-kvq plugin`: libggml-kvq.so for a program that brings its own llama.cpp."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..resolver import FirstUse

HELP = "use the library in a program with a llama.cpp of its own: two lines of environment, or a file beside it"
MORE = ("predictors", "coordinates")  # than means


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
    for more in MORE:
        p.add_argument(f"--{more}", action="store_true", help=f"with -m: fit {more} too, for {more}=on")
    p.add_argument("-t", "--threads", type=int, help="for -m: default all CPUs that may be used")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 done; a folder that holds no such llama.cpp is refused, and a model that cannot be measured."""
    from .. import methods
    from ..errors import KvqError
    from ..launch import plugin

    asked = [more for more in MORE if getattr(args, more)]
    if len(asked) > 1:
        raise KvqError("--predictors and --coordinates do not go together; drop one of them")
    if args.model:
        kind = FirstUse[asked[0].upper()] if asked else None
        print(f"# measured: {plugin.measure(args.model, args.threads, kind)}")
    elif asked:
        raise KvqError(f"--{asked[0]} goes with -m MODEL, whose {asked[0]} are to be fitted; add that or drop it")
    if args.install:
        print("\n".join(plugin.install(args.install)))
    elif args.remove:
        print(f"removed {plugin.remove(args.remove)}")
    else:
        methods.check(args.method, "")
        print("\n".join(plugin.environment(args.method)))
        print(f"# {plugin.NEEDS}", file=sys.stderr)
    return 0
