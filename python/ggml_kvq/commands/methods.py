"""`ggml-kvq methods [NAME]`: the methods, or one method's options."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import Any


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser("methods", help="list the methods, or the options of one")
    parser.add_argument("name", nargs="?", metavar="NAME", help="a method: show its options")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .. import methods

    rows = [methods.find(args.name)] if args.name else methods.table()
    if args.json:
        print(json.dumps(rows[0] if args.name else rows, indent=2))
    elif args.name:
        print(describe(rows[0]))
    else:
        width = max(len(row["name"]) for row in rows)
        for row in rows:
            print(f"{row['name']:<{width}}  {row['summary']}")
        print(
            "\nOptions of one: ggml-kvq methods NAME. Use: llama-cli -m MODEL.gguf --kv-method NAME --kv-opt KEY=VALUE"
        )
    return 0


def describe(row: dict[str, Any]) -> str:
    """Text about one method: summary, paper, then key, default, type, help and source of each option."""
    lines = [f"{row['name']}: {row['summary']}", f"source: {row['paper']}", ""]
    if not row["options"]:
        return "\n".join([*lines, "no options"])
    table = [("--kv-opt", "default", "type")] + [(o["key"], o["default_value"], o["type"]) for o in row["options"]]
    widths = [max(len(line[i]) for line in table) for i in range(3)]
    texts = [""] + [f"{o['help']} ({o['source']})" if o["source"] else o["help"] for o in row["options"]]
    indent = sum(widths) + 6
    for cells, text in zip(table, texts, strict=True):
        head = "  ".join(f"{cell:<{w}}" for cell, w in zip(cells, widths, strict=True)) + "  "
        body = textwrap.wrap(text, max(40, 120 - indent)) or [""]
        lines += [(head + body[0]).rstrip(), *(" " * indent + more for more in body[1:])]
    return "\n".join(lines)
