"""`ggml-kvq lab`: begin a laboratory method, an idea for a cache as a Python class."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import MethodError

HELP = "begin a cache method of your own in Python (docs/laboratory.md)"


def register(subparsers: Any) -> None:
    """Add the `lab` parser and its commands."""
    p = subparsers.add_parser("lab", help=HELP, description=HELP)
    commands = p.add_subparsers(dest="lab_command", required=True, metavar="new")
    new = commands.add_parser("new", help="write a commented file to begin with", description="write a commented file")
    new.add_argument("file", help="name of the new Python file")
    new.set_defaults(run=run_new)


def run_new(args: argparse.Namespace) -> int:
    """Write the start file; nothing is overwritten."""
    from .. import files
    from ..lab import start

    path = Path(args.file)
    if path.suffix != ".py":
        raise MethodError(f"{path} is no name of a Python file; write {path.with_suffix('.py')}")
    if path.exists():
        raise MethodError(f"{path} is there already; choose another name")
    text = Path(start.__file__).read_text(encoding="utf-8").replace("FILE.py", str(path))
    with files.whole(path) as partial:
        partial.write_text(text, encoding="utf-8")
    print(
        f"{path}: try it with\n"
        f"  ggml-kvq eval -m MODEL.gguf -f TEXT.txt --cache lab:{path}:Mine,bits=3 --cache kivi:bits=2"
    )
    return 0
