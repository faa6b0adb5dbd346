"""`ggml-kvq tune`: measure which layers deserve bits, once for every budget."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from .. import default_means, sidecars
from . import _sizes as sizes


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "tune", help="measure which layers deserve bits, for method auto at any budget, and write it as a sidecar GGUF"
    )
    parser.add_argument(
        "-m",
        "--model",
        required=True,
        metavar="FILE",
        help="GGUF model, hf:owner/repo/file.gguf or a name that ggml-kvq fetch lists",
    )
    parser.add_argument("-f", "--file", required=True, metavar="TEXT", help="text of the kind the model will see")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="sidecar to write (default: the model's name with .kvq.gguf)"
    )
    parser.add_argument(
        "--sequences", type=sizes.tokens, default=4, metavar="N", help="windows of the text to measure on (default 4)"
    )
    parser.add_argument(
        "--length", type=sizes.tokens, default=2048, metavar="N", help="tokens of a window (default 2048)"
    )
    parser.add_argument("-t", "--threads", type=sizes.positive, metavar="N", help="CPU threads")
    parser.set_defaults(run=run, interrupted="the same command goes on where it stopped")


def run(args: argparse.Namespace) -> int:
    from .. import hub
    from ..calibrate import files, tune
    from ..errors import KvqError
    from ..files import alone, read_text
    from .calibrate import check_inputs, output_of

    model = hub.resolve(args.model)
    check_inputs(model, args.file)
    if args.sequences < 1 or not 256 <= args.length <= 4096:
        raise KvqError(
            f"--sequences {args.sequences} of --length {args.length}: choose 1 or more, of 256 to 4096 tokens"
        )
    files._gguf()
    out = output_of(args, model)
    folder = out.with_name(out.name + ".partial")
    text = read_text(args.file, "-f")
    with alone(out, "ggml-kvq tune"):
        tuned = tune.fit(
            model,
            text,
            folder=folder,
            n_windows=args.sequences,
            length=args.length,
            n_threads=args.threads,
        )
        files.write_sidecar(out, tune.fields(model, tuned), files.arrays(tuned.means))
        tune.remove(folder)
    print(f"{'bits at 131072 tokens':>21} {'divergence from f16, nats a token':>35}")
    for bits, _, kld in tuned.frontier:
        print(f"{bits:>21.2f} {kld:>35.4f}")
    print(f"{out}: {tuned.n_tokens} tokens, {tuned.seconds:.0f} s, peak memory {tuned.means.peak_mib:.0f} MiB")
    if note := default_means.note_of_plain_data():
        print(note)
    m = shlex.quote(str(model))
    config = "" if str(out) == sidecars.default_path(model) else f" --kv-config {shlex.quote(str(out))}"
    print(
        f"next: llama-cli -m {m} --kv-bits 2.5{config}\n"
        f"      ggml-kvq eval -m {m} --cache {shlex.quote(f'auto:bits=2.5@{out}')} -f ANOTHER.txt"
        "  # a text that was not tuned on"
    )
    return 0
