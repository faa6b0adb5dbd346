"""`ggml-kvq bench`: speed of KV caches on a model, against upstream's f16 in the same run."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from .. import cpus
from . import _sizes as sizes

HELP = "measure speed: generation and prompt tokens/s at depth, against upstream's f16 cache"


def register(subparsers: Any) -> None:
    """Add the `bench` parser."""
    p = subparsers.add_parser(
        "bench", help=HELP, description=HELP + ". Runs llama-bench, caches in turn; figures are medians."
    )
    p.add_argument(
        "-m", "--model", required=True, help="GGUF model, hf:owner/repo/file.gguf or a name that ggml-kvq fetch lists"
    )
    p.add_argument(
        "--cache",
        action="append",
        default=[],
        metavar="SPEC",
        help="a cache, as for ggml-kvq eval, but not simulated:...; repeatable (f16 is always measured)",
    )
    p.add_argument(
        "-d", "--depths", type=sizes.token_list, default=[0, 4096], help="tokens already in the cache (default 0,4096)"
    )
    p.add_argument("-n", "--n-gen", type=sizes.tokens, default=32, help="tokens generated (default 32; 0: none)")
    p.add_argument(
        "-p", "--n-prompt", type=sizes.tokens, default=0, help="tokens of a prompt read at each depth (default 0: none)"
    )
    p.add_argument("-t", "--threads", type=sizes.positive, default=cpus.available(), help="CPU threads (default: all)")
    p.add_argument("-ub", "--ubatch-size", type=sizes.tokens, default=512, help="tokens decoded at once (default 512)")
    p.add_argument("-r", "--reps", type=sizes.positive, default=2, help="repetitions in a process (default 2)")
    p.add_argument("--rounds", type=sizes.positive, default=3, help="times that the caches alternate (default 3)")
    p.add_argument(
        "--device", default="", help="llama.cpp device of upstream's caches (default: the CPU); KVQ0 runs ours"
    )
    p.add_argument("-o", "--output", help="append one JSON line per row, as ggml-kvq plot speed reads")
    p.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    p.set_defaults(run=run, interrupted="the rows so far, if any, stand above, and in the -o file if one was given")


def run(args: argparse.Namespace) -> int:
    """Entry point."""
    from .. import bench, files, gguf_header, hub
    from ..errors import KvqError
    from ..evaluate import results
    from ..evaluate.specs import parse, parse_built

    specs = [parse_built(text, "speed") for text in args.cache]
    if not any(s.is_reference for s in specs):
        specs.insert(0, parse("f16"))
    if len({s.label for s in specs}) < len(specs):
        raise KvqError("two caches have the same name; give one of them another: NAME=SPEC")
    if not args.n_gen and not args.n_prompt:
        raise KvqError("nothing to measure; give -n or -p a number of tokens above 0")
    model = hub.resolve(args.model)
    if not model.is_file():
        raise KvqError(f"{model} is not a file; give -m a GGUF model")
    header = gguf_header.read(model, tensors=True)
    header.check_whole()
    settings = bench.Settings(
        tuple(args.depths),
        args.n_gen,
        args.n_prompt,
        args.ubatch_size,
        args.threads,
        args.reps,
        args.rounds,
        args.device,
    )
    for spec in specs:
        spec.check()
    if args.output:
        files.probe(args.output)
        results.ResultFile(args.output)  # what is there already must be rows too
    deepest = max(args.depths) + max(args.n_gen, args.n_prompt)
    if deepest > (trained := gguf_header.trained_for(header)) > 0:
        print(
            f"ggml-kvq bench: warning: -d {max(args.depths)} goes beyond the {trained} tokens that the model was"
            " trained for: the speed is right, its text would not be",
            file=sys.stderr,
        )
    bench.measure(model, specs, args.threads)
    bench.check(model, specs, settings)
    rows: list[bench.Row] = []
    try:
        for row in bench.run(model, specs, settings):
            rows.append(row)
            if args.output:
                files.append_line(args.output, json.dumps(row))
    finally:  # what was measured is shown, whatever came in between
        if rows:
            print(bench.summary(rows, markdown=args.markdown), flush=True)
    return 0
