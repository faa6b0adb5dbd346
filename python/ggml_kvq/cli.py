"""`ggml-kvq`: the management command. A subcommand is one module in ggml_kvq/commands/ with `register(subparsers)`."""

from __future__ import annotations

import argparse
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from . import __version__, commands
from .errors import KvqError


class Parser(argparse.ArgumentParser):
    """As argparse's, but an error is one line: the usage of a subcommand with 20 options hides it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help tells more)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser with every module of ggml_kvq.commands registered.

    register(subparsers) adds its parser with subparsers.add_parser(NAME, help=...) and calls
    parser.set_defaults(run=FUNCTION); FUNCTION(args) returns the exit code and raises KvqError for a refused input.
    Modules import what is heavy inside FUNCTION.
    """
    parser = Parser(prog="ggml-kvq", description="Manage KV caches of 1-4 calibrated bits for llama.cpp.")
    parser.add_argument("--version", action="version", version=f"ggml-kvq {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in sorted(m.name for m in pkgutil.iter_modules(commands.__path__) if not m.name.startswith("_")):
        import_module(f".{module}", commands.__name__).register(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit codes: 0 done, 1 failed, 2 refused input; errors are one line on stderr."""
    args = build_parser().parse_args(argv)
    try:
        code = int(args.run(args) or 0)
        sys.stdout.flush()
        return code
    except KvqError as e:
        print(f"ggml-kvq {args.command}: error: {e}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `ggml-kvq methods | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as e:
        print(
            f"ggml-kvq {args.command}: error: {e.filename or ''}: {e.strerror or e}; check the path and its"
            " permissions",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        hint = getattr(args, "interrupted", "")
        print(f"ggml-kvq {args.command}: stopped" + (f"; {hint}" if hint else ""), file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
