"""`ggml-kvq eval`: measure KV caches against f16 on a text, on retrieval tasks, on long generation and on documents."""

from __future__ import annotations

import argparse
from typing import Any

from .. import cpus
from ..evaluate import tasks
from . import _sizes as sizes

HELP = "measure quality: perplexity, KL divergence, retrieval, drift, documents"
EPILOG = """\
caches (--cache, repeatable):
  f16                              upstream's f16 cache, the reference (always measured)
  upstream:q4_0/q4_0               upstream's cache types for K and V
  simulated:q4_0,window=128        one of these types with an exact window (docs/evaluation.md)
  kivi:bits=2,group=32             a method and its options (`ggml-kvq methods`)
  aqua:predictor=full@calib.gguf   ... with calibrated data
  aqua:predictor=bias@measured     ... with what is measured at a model's first use
  auto:bits=2.25@none              ... without any, as in a program that loads the library by itself
  lab:mine.py:Mine,bits=2          a class of the laboratory, simulated (`ggml-kvq lab new mine.py`)
  name=kivi:bits=2                 any of them under a name of your own

example:
  ggml-kvq eval -m model.gguf --cache upstream:q4_0 --cache kivi:bits=2 -f text.txt -c 2048 -ub 128 -o results.jsonl
"""


def register(subparsers: Any) -> None:
    """Add the `eval` parser; its `run` default is the entry point."""
    p = subparsers.add_parser(
        "eval", help=HELP, description=HELP, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "-m", "--model", required=True, help="GGUF model, hf:owner/repo/file.gguf or a name that ggml-kvq fetch lists"
    )
    p.add_argument(
        "--cache", action="append", default=[], metavar="SPEC", help="a cache to measure; repeatable, see below"
    )
    p.add_argument(
        "-o",
        "--output",
        default="results.jsonl",
        help="result file (default results.jsonl); rows already there are reused, not measured again",
    )
    p.add_argument("-t", "--threads", type=sizes.positive, default=cpus.available(), help="CPU threads (default: all)")
    p.add_argument(
        "-ub",
        "--ubatch-size",
        type=sizes.tokens,
        help="tokens decoded at once (default 128, an eighth of a window below 1024)",
    )
    p.add_argument(
        "--no-swa-full",
        dest="swa_full",
        action="store_false",
        help="layers with a sliding window keep their window alone, as in llama.cpp's programs (default: all tokens)",
    )
    p.add_argument(
        "--bits-at",
        type=sizes.tokens,
        default=0,
        metavar="N",
        help="state a cache's true bits in a context of N tokens, too",
    )
    p.add_argument("--markdown", action="store_true", help="print the summary as Markdown")
    p.add_argument("--quiet", action="store_true", help="no progress bar")

    g = p.add_argument_group("text: perplexity and divergence, as llama-perplexity defines them")
    g.add_argument("-f", "--file", help="text file; without it this part is left out")
    g.add_argument("-c", "--ctx-size", type=sizes.tokens, default=2048, help="window in tokens (default 2048)")
    g.add_argument(
        "--stride",
        type=sizes.tokens,
        default=0,
        help="start a window every N tokens, score its last N (default 0: end to end)",
    )
    g.add_argument("--chunks", type=sizes.tokens, default=0, help="at most so many windows (default 0: all)")
    g.add_argument(
        "--base", help="file of the f16 log-probabilities (llama-perplexity's format; default: beside the output)"
    )

    g = p.add_argument_group("retrieval tasks")
    g.add_argument("--tasks", default="", help=f"comma list of {','.join(tasks.TASKS)}")
    g.add_argument(
        "--lengths",
        type=sizes.token_list,
        default=[1000, 2000, 4000],
        help="prompt lengths in tokens (default 1000,2000,4000)",
    )
    g.add_argument("--samples", type=sizes.positive, default=50, help="samples a cell (default 50)")
    g.add_argument("--seed", type=sizes.natural, default=0, metavar="N", help="first seed of the samples (default 0)")
    g.add_argument("--chat", action="store_true", help="ask in the model's chat template")
    g.add_argument("--filler", help="text file to hide the facts in (default: made-up sentences)")

    g = p.add_argument_group("long generation")
    g.add_argument(
        "--drift",
        type=sizes.tokens,
        default=0,
        metavar="N",
        help="generate N tokens with f16 and follow them (2048 is usual)",
    )
    g.add_argument("--prompt", default="The", help="prompt of the long generation")

    g = p.add_argument_group("documents")
    g.add_argument("--documents", help="LongBench- or RULER-style .jsonl file or folder")
    g.add_argument("--format", choices=("longbench", "ruler"), help="format of the documents (default: by their keys)")
    g.add_argument("--max-tokens", type=sizes.tokens, default=64, help="answer length in tokens (default 64)")
    g.add_argument("--max-documents", type=sizes.tokens, default=0, help="at most so many documents (default 0: all)")
    p.set_defaults(run=run, interrupted="rows that were finished are in the output file: the same command goes on")


def run(args: argparse.Namespace) -> int:
    """Entry point; imports numpy and the native libraries only now."""
    from ..evaluate.run import run

    return run(args)
