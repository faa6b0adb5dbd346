"""`ggml-kvq calibrate`: fit a method's data on a text and write it as a sidecar GGUF."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from .. import default_means, sidecars
from . import _sizes as sizes

DEFAULTS: dict[str, Any] = {
    "preset": "1.38",
    "predictor": "bias",
    "weights": "f16",
    "k_bits": 2,
    "v_bits": 2,
    "first_bits": 4,
    "sequences": 64,
    "length": 2048,
    "sinks": 4,
    "seed": 0,
    "coords": 0,
}
# Flags that are nothing to one way of calibrating, and what they go with.
OF_PREDICTORS = ("weights", "k_bits", "v_bits", "first_bits", "work", "hf")
OF_MEANS = ("predictor", "sequences", "sinks", "seed", "coords")
XQUANT_WINDOW = 128  # tokens that xquant keeps in f16 while it is searched
SEARCHED = 1024  # tokens of a window of xquant's search at most


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "calibrate", help="fit what method aqua subtracts from a model's cache, and write it as a sidecar GGUF"
    )
    parser.add_argument("-m", "--model", required=True, metavar="FILE", help="GGUF model")
    parser.add_argument(
        "--method", choices=("aqua", "xquant"), default="aqua", help="method to calibrate for (default aqua)"
    )
    parser.add_argument("--preset", choices=("1.38", "1.41", "1.16"), help="xquant: code bits to keep (default 1.38)")
    parser.add_argument(
        "-f",
        "--file",
        metavar="TEXT",
        help="text of the kind the model will see; xquant without it: the preset alone; --coords"
        " without it: the package's own",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="sidecar to write (default: the model's name with .kvq.gguf)"
    )
    parser.add_argument(
        "--predictor",
        choices=("bias", "k", "full", "fold"),
        help="channel means, or linear predictors of keys, of both, or of both from keys alone (default bias)",
    )
    parser.add_argument(
        "--coords",
        type=sizes.coords,
        metavar="N",
        help="with means: coordinates of cells, a head's share of a layer's, even, as 12; auto: as many as hold nine"
        " tenths of the keys' energy (default 0)",
    )
    parser.add_argument("--weights", choices=("f16", "q4_0"), help="format of the predictors (default f16)")
    for name, what in (("k_bits", "keys"), ("v_bits", "values"), ("first_bits", "the first layer, at least")):
        parser.add_argument(
            flag(name),
            type=int,
            metavar="N",
            help=f"code bits the cache will give {what} (default {DEFAULTS[name]})",
        )
    parser.add_argument(
        "--hf",
        metavar="DIR",
        help="run this Hugging Face model (a folder, or an id on the hub) instead of the GGUF, which names it",
    )
    parser.add_argument(
        "--work",
        metavar="DIR",
        help="where a folder of captured rows lies while predictors are fitted (default: beside the output)",
    )
    parser.add_argument("--sequences", type=sizes.tokens, metavar="N", help="sequences to run (default 64)")
    parser.add_argument(
        "--length",
        type=sizes.tokens,
        metavar="N",
        help=f"tokens of a sequence (default 2048; xquant: of a window, {SEARCHED} at most)",
    )
    parser.add_argument("--sinks", type=int, metavar="N", help="first tokens of each sequence to leave out (default 4)")
    parser.add_argument("--seed", type=sizes.natural, metavar="N", help="which sequences of the text (default 0)")
    parser.add_argument("-t", "--threads", type=sizes.positive, metavar="N", help="CPU threads")
    parser.set_defaults(run=run, interrupted="the same command goes on from its last checkpoint, if there is one")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def settle(args: argparse.Namespace) -> None:
    """Defaults of what was not given. KvqError for a flag that this way of calibrating would leave unread."""
    from ..errors import KvqError

    if args.method == "xquant":
        passed_over = dict.fromkeys((*OF_MEANS, *OF_PREDICTORS), "--method aqua")
        if not args.file:
            passed_over["length"] = "-f TEXT, which xquant searches on"
    else:
        passed_over = {"preset": "--method xquant"}
        if args.predictor in (None, "bias"):
            passed_over |= dict.fromkeys(
                OF_PREDICTORS, "--predictor k, full or fold; means are f32, of the GGUF itself"
            )
        else:
            passed_over["coords"] = "--predictor bias"
    for name, cure in passed_over.items():
        if getattr(args, name) is not None:
            raise KvqError(f"{flag(name)} {getattr(args, name)} goes with {cure}; add that or drop it")
    if args.method == "xquant" and (args.length or 0) > SEARCHED:
        raise KvqError(f"--length {args.length}: xquant searches on windows of {SEARCHED} tokens at most; choose fewer")
    if args.method == "xquant" and args.length is not None and args.length <= 2 * XQUANT_WINDOW:
        raise KvqError(
            f"--length {args.length}: xquant keeps the newest {XQUANT_WINDOW} tokens in f16 and is scored on the second"
            f" half of a window, which would read no codes; give --length {3 * XQUANT_WINDOW} or more"
        )
    own = {}  # with the package's text
    if args.coords and not args.file:
        own = {"sequences": default_means.SEQUENCES, "length": default_means.LENGTH}
    for name, value in {**DEFAULTS, **own}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def run(args: argparse.Namespace) -> int:
    from .. import hub
    from ..calibrate import files
    from ..errors import KvqError
    from ..files import alone, read_text

    settle(args)
    if args.method == "xquant":
        return run_xquant(args)
    if not args.file and not args.coords:
        raise KvqError("aqua is calibrated on a text; give -f TEXT")
    model = hub.resolve(args.model)
    check_inputs(model, args.file)
    out = output_of(args, model)
    if args.sequences < 1 or not 0 <= args.sinks < args.length:
        raise KvqError(
            f"--sequences {args.sequences} with --sinks {args.sinks} leaves no tokens; choose at least 1 and fewer"
            " sinks than --length"
        )
    files._gguf()
    own = (default_means.TEXT, default_means.MORE)
    text = read_text(args.file, "-f") if args.file else "\n".join(x.read_text(encoding="utf-8") for x in own)
    with alone(out, "ggml-kvq calibrate"):
        return (run_means if args.predictor == "bias" else run_predictors)(args, model, out, text)


def run_means(args: argparse.Namespace, model: Path, out: Path, text: str) -> int:
    from ..calibrate import files, halves, means
    from ..calibrate.basis import AUTO

    checkpoint = out.with_name(out.name + ".partial.npz")
    fitted = means.fit(
        model,
        text,
        n_sequences=args.sequences,
        length=args.length,
        sinks=args.sinks,
        seed=args.seed,
        n_threads=args.threads,
        checkpoint=checkpoint,
        progress=True,
        coords=args.coords,
    )
    if not args.coords:
        fitted = halves.checked(model, fitted, text, args.threads)
    elif fitted.pairs != "none":
        fitted.pairs = "sorted"  # of what coordinates leave, fast pairs are no noise
        if args.coords == AUTO:
            fitted = halves.with_coordinates(model, fitted, text, args.threads)
    files.write_sidecar(out, files.fields(model, fitted, args.sinks), files.arrays(fitted))
    checkpoint.unlink(missing_ok=True)
    print(f"{'layer':>5} {'K energy in means':>18} {'V energy in means':>18}")
    for il, (k, v) in fitted.removed.items():
        print(f"{il:>5} {100 * k:>17.1f}% {100 * v:>17.1f}%")
    if fitted.coords is not None:
        print(
            f"{fitted.coords} coordinates a head"
            if fitted.coords
            else "no coordinates: they lost more than they brought"
        )
    print(f"{out}: {fitted.n_tokens} tokens in {fitted.seconds:.0f} s, peak memory {fitted.peak_mib:.0f} MiB")
    if not args.coords and (note := default_means.note_of_plain_data()):
        print(f"{note} --coords auto fits them on your text.")
    print(next_commands(args, model, out))
    return 0


def output_of(args: argparse.Namespace, model: Path) -> Path:
    """The sidecar to write. KvqError when it is a file that is read, or when nothing can be written there."""
    from .. import files

    out = Path(args.output or sidecars.default_path(model))
    files.keep_inputs(out, "-o", model, args.file)
    files.probe(out)
    return out


def check_inputs(model: Path, text: str | None) -> None:
    """Refuse a model or text that is not there, or a model that is cut off, before anything runs."""
    from .. import gguf_header
    from ..errors import KvqError

    for what, path in (("-m", model), ("-f", text)):
        if path and not Path(path).is_file():
            raise KvqError(f"{what} {path} is not a file; give {'a GGUF model' if what == '-m' else 'a text'}")
    gguf_header.read(model, tensors=True).check_whole()


def next_commands(args: argparse.Namespace, model: Path, out: Path) -> str:
    """What to do with the data: run, measure, put into the model. A sidecar in its default place is found by itself."""
    found = out == Path(sidecars.default_path(model))
    config = "" if found else f" --kv-config {shlex.quote(str(out))}"
    m, other = shlex.quote(str(model)), "  # a text that was not calibrated on" if args.file else ""
    whole = shlex.quote(str(model.with_name(f"{model.stem}-{args.method}.gguf")))
    method = "auto" if args.coords else args.method
    return (
        f"next: llama-cli -m {m} --kv-method {method}{config}\n"
        f"      ggml-kvq eval -m {m} --cache {shlex.quote(f'{method}@{out}')} -f ANOTHER.txt{other}\n"
        f"      ggml-kvq embed {m} {shlex.quote(str(out))} {whole}"
    )


def run_predictors(args: argparse.Namespace, model: Path, out: Path, text: str) -> int:
    from ..errors import KvqError
    from ..files import alone

    for name in ("k_bits", "v_bits", "first_bits"):
        if not 1 <= getattr(args, name) <= 4:
            raise KvqError(f"--{name.replace('_', '-')} {getattr(args, name)} is not within 1..4")
    folder = (Path(args.work) if args.work else out.parent) / (out.name + ".partial")
    with alone(folder.with_suffix(".rows"), "ggml-kvq calibrate"):
        return fit_predictors(args, model, out, text, folder)


def fit_predictors(args: argparse.Namespace, model: Path, out: Path, text: str, folder: Path) -> int:
    from ..calibrate import capture, files, halves, predictors
    from ..calibrate.means import Means

    files.identity(model)
    bits = predictors.Bits(args.k_bits, args.v_bits, args.first_bits)
    source: predictors.Source
    if args.hf:
        from ..calibrate.hf import HfSource

        source = HfSource(args.hf, model, text, args.length, args.threads)
    else:
        source = capture.GgufSource(model, text, args.length, args.threads)
    fit = predictors.fit(
        source,
        predictor=args.predictor,
        bits=bits,
        form=args.weights,
        n_sequences=args.sequences,
        length=args.length,
        sinks=args.sinks,
        seed=args.seed,
        folder=folder,
        n_threads=args.threads,
        progress=True,
    )
    if fit.pairs != "none":  # how keys are split where nothing is predicted
        flat = {il: (x.order[0].reshape(-1), x.order[1].reshape(-1)) for il, x in fit.layers.items() if x.order}
        mean = {il: x.mean for il, x in fit.layers.items()}
        fit.pairs = halves.checked(model, Means(mean=mean, pairs=fit.pairs, order=flat), text, args.threads).pairs
    files.write_sidecar(out, files.predictor_fields(model, fit, bits, args.sinks), files.predictor_arrays(fit))
    predictors.clear(folder)
    print_fit(fit)
    print(
        f"{out}: {fit.n_tokens} tokens in {fit.seconds:.0f} s ({fit.seconds_capture:.0f} s running the model), peak"
        f" memory {fit.peak_mib:.0f} MiB, {fit.disk_mib:.0f} MiB of rows on disk"
    )
    print(next_commands(args, model, out))
    return 0


def print_fit(fit: Any) -> None:
    """Explained variance by layer, and by number of sequences; of values only where they are predicted."""
    values = fit.predictor != "k"

    def columns(k: str, v: str) -> str:
        return f"{k:>12} {v:>12}" if values else f"{k:>12}"

    print(
        f"{'layer':>5} {columns('K explained', 'V explained')}   of the variance behind the means, on sequences"
        " held out"
    )
    later = [x for x in fit.layers.values() if x.prev >= 0]
    for il, x in fit.layers.items():
        if x.prev >= 0:
            k, v = (f"{100 * part:.1f}%" for part in x.explained)
            print(f"{il:>5} {columns(k, v)}")
    for n in sorted({n for x in later for n in x.gain}):
        k, v = (f"{100 * sum(x.gain[n][i] for x in later) / len(later):.1f}%" for i in range(2))
        print(f"fitted on {n:>4} sequences: K {k}{f', V {v}' if values else ''} in the mean of layers")
    if not values:
        print("values: their means alone are taken off (--predictor full predicts them too)")


def run_xquant(args: argparse.Namespace) -> int:
    from .. import hub
    from ..calibrate import capture, files, xquant
    from ..files import alone, read_text

    model = hub.resolve(args.model)
    check_inputs(model, args.file)
    out = output_of(args, model)
    n_layer = len(capture.layers(model))
    with alone(out, "ggml-kvq calibrate"):
        best = start = xquant.preset(args.preset, n_layer)
        if args.file:
            text = read_text(args.file, "-f")
            best = xquant.search(model, text, start, n_ctx=min(args.length, SEARCHED), n_threads=args.threads).best
        files.write_sidecar(out, xquant.fields(model, best), {})
    how = "searched on " + args.file if args.file else f"preset {args.preset}, no data"
    shared = (
        "codes shared by layer pairs"
        if best.shared == "codes"
        else "no codes in sharing layers: the null is better on this text"
    )
    print(
        f"{out}: {how}: {xquant.code_bits(best, n_layer):.2f} code bits,"
        f" {shared if min(best.km, best.vm) < n_layer else 'nothing shared'}"
    )
    print(next_commands(args, model, out))
    return 0
