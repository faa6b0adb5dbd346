"""`ggml-kvq embed`: a copy of a model that carries calibrated data and names its method; unmodified llama.cpp still
loads it.
"""

from __future__ import annotations

import argparse
from typing import Any


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "embed", help="copy a model with calibrated data inside, so that it chooses its own method"
    )
    parser.add_argument("model", metavar="MODEL", help="GGUF model")
    parser.add_argument("sidecar", metavar="SIDECAR", help="what ggml-kvq calibrate wrote")
    parser.add_argument("output", metavar="OUTPUT", help="model file to write")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import os

    from ..calibrate import files
    from ..errors import KvqError

    if os.path.exists(args.output) and os.path.samefile(args.model, args.output):
        raise KvqError(f"{args.output} is the model itself; choose another name")
    files.embed(args.model, args.sidecar, args.output)
    print(f"{args.output}: {args.model} with the data of {args.sidecar}")
    return 0
