"""`ggml-kvq doctor`: is everything there that a user needs, and what to do where it is not."""

from __future__ import annotations

import argparse
from typing import Any

HELP = "check the installation, the environment and, with -m, a model; each problem with its cure"


def register(subparsers: Any) -> None:
    """Add the `doctor` parser."""
    p = subparsers.add_parser("doctor", help=HELP, description=HELP)
    p.add_argument("-m", "--model", help="also load this GGUF model and decode a few tokens with and without a method")
    p.add_argument(
        "--program",
        metavar="PATH",
        help="check this one instead: a program of llama.cpp, ollama, a Python with llama-cpp-python, a folder with"
        " node_modules or with a llama.cpp's libraries; with -m one token is made",
    )
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when nothing is broken; warnings do not count."""
    from ..launch import doctor

    worst = 0
    for check in doctor.of_program(args.program, args.model) if args.program else doctor.checks(args.model):
        print(f"{('ok', 'note', 'BAD')[check.level]:<5} {check.what}: {check.found}", flush=True)
        if check.cure:
            print(f"      -> {check.cure}", flush=True)
        worst = max(worst, check.level)
    print({0: "all is well", 1: "nothing is broken", 2: "something is broken"}[worst])
    return 1 if worst == 2 else 0
