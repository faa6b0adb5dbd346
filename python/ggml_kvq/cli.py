"""`ggml-kvq`: the management command. A subcommand is one module in ggml_kvq/commands/ with `register(subparsers)`."""

from __future__ import annotations

import argparse
import io
import os
import pkgutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, NoReturn, TextIO

from . import __version__, commands
from .errors import KvqError


class Parser(argparse.ArgumentParser):
    """As argparse's, but an error is one line: the usage of a subcommand with 20 options hides it."""

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse's own swallows the error of an output that takes nothing: `--help > /dev/full` ended with 0."""
        if message and (file or sys.stderr) is not None:
            (file or sys.stderr).write(message)

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
    for choice in subparsers._choices_actions:  # --help of one says at least what --help of all says of it
        of_choice = subparsers.choices[choice.dest]
        of_choice.description = of_choice.description or choice.help
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit codes: 0 done, 1 failed, 2 refused input, 130 Ctrl-C, 143 SIGTERM; errors are one line on
    stderr.
    """
    args = argparse.Namespace(command="")
    with standard_output() as output:
        try:
            parser = build_parser()
            _, unknown = parser.parse_known_args(argv, args)
            if unknown:
                _command(parser, args.command).error(f"unknown: {' '.join(unknown)}")
            with termination():
                code = int(args.run(args) or 0)
            output.flush()
            return code
        except KvqError as e:
            return _refused(args.command, str(e))
        except SystemExit:  # --help, --version
            try:
                output.flush()
            except OSError as problem:
                return _lost(args.command, problem)
            raise
        except UnicodeEncodeError as e:
            return _refused(args.command, f"{e.object!r} is no text in UTF-8; give it a name that is")
        except OSError as e:
            if e.filename is not None:
                return _refused(args.command, f"{e.filename}: {e.strerror or e}; check the path and its permissions")
            return _lost(args.command, e)
        except KeyboardInterrupt as e:
            hint = getattr(args, "interrupted", "")
            print(
                f"{' '.join(filter(None, ('ggml-kvq', args.command)))}: stopped" + (f"; {hint}" if hint else ""),
                file=sys.stderr,
            )
            return 128 + (signal.SIGTERM if isinstance(e, Terminated) else signal.SIGINT)


def _command(parser: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser:
    """The parser of a command, whose --help has the flags that were not found."""
    choices = next(a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return choices.get(name, parser)


ONE_SIGNAL = 1.0  # seconds in which a second SIGTERM is the first one


class Terminated(KeyboardInterrupt):
    """SIGTERM: whatever ends in order at Ctrl-C does so at this too."""


@contextmanager
def termination() -> Iterator[None]:
    """SIGTERM raises Terminated in the block, once: one that comes a second later ends the process as it always did.
    timeout(1) sends two at once. Where somebody else handles it, and in other threads than the main one, nothing is
    changed.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return

    def stop(number: int, frame: object) -> NoReturn:
        first = time.monotonic()

        def again(number: int, frame: object) -> None:
            if time.monotonic() - first >= ONE_SIGNAL:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.raise_signal(signal.SIGTERM)

        signal.signal(signal.SIGTERM, again)
        raise Terminated

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def standard_output() -> Iterator[TextIO]:
    """sys.stdout that takes every text: closed, it is /dev/null; what its encoding lacks is written as \\uXXXX."""
    before = sys.stdout
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # lives as long as the command
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield sys.stdout
    finally:
        sys.stdout = before


def _refused(command: str, message: str) -> int:
    print(f"{' '.join(filter(None, ('ggml-kvq', command)))}: error: {message}", file=sys.stderr)
    return 2


def _lost(command: str, e: OSError) -> int:
    """The output could not be written; what is left of it goes nowhere, so that Python says nothing more at its end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(e, BrokenPipeError):  # `ggml-kvq methods | head`
        return 1
    return _refused(command, f"the output could not be written: {e.strerror or e}")


if __name__ == "__main__":
    sys.exit(main())
