"""`ggml-kvq report`: result files as one page."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def register(subparsers: Any) -> None:
    p = subparsers.add_parser("report", help="write result files of eval as one HTML page: choices, frontier, tables")
    p.add_argument("files", nargs="+", metavar="RESULTS", help="result files (.jsonl) of ggml-kvq eval")
    p.add_argument("-o", "--output", default="report.html", help="page to write (default report.html)")
    p.add_argument("--title", default="", help="headline (default: the models' names)")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from .. import files, report
    from ..errors import KvqError
    from ..evaluate import results

    for path in args.files:
        if not Path(path).is_file():
            raise KvqError(f"{path} is not a file; give what ggml-kvq eval -o wrote")
    files.keep_inputs(args.output, "-o", *args.files)
    rows = [row for path in args.files for row in results.read(path)]
    kept = results.shown(rows, lambda line: print(f"ggml-kvq report: {line}", file=sys.stderr))
    report.write(kept, args.output, args.title)
    print(args.output)
    return 0
