"""Means without calibration: for methods that go better with channel means (auto, specache), measured once per model
on a text that comes with this package, and kept in the user's cache folder.

Keys before rotary embedding and values have means that belong to the model far more than to the text: those of this
text leave 0.46 of the divergence of 2-bit caches, those of the very text's first 128 tokens 0.48
(docs/methods/auto.md).

Coordinates, which auto takes on a CPU, and predictors (`predictors=on`) are fitted here as well, on more of such text,
and lie in a file of their own beside that of means.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import byref, c_char_p
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import budget, gguf_header, methods
from .core import native
from .errors import KvqError
from .progress import Line
from .resolver import BY_FLAGS, FirstUse, Request, resolve

LENGTH = 1024  # tokens; a model whose vocabulary makes fewer of the text gets what there is
SINKS = 4
TEXT = Path(__file__).with_name("data") / "means.txt"
MORE = TEXT.with_name("predictors.txt")  # read after TEXT where more than means is fitted
SEQUENCES = 8  # of LENGTH tokens, for that; fewer where the texts make fewer
CURES = {  # of `ggml-kvq calibrate`, and what they are here
    "use --predictor bias": "leave predictors=on out",
    "leave --coords out": "leave coordinates=on out",
    "lower --sequences or give --work another folder": "make room, or set KVQ_CACHE_DIR to another folder",
}
DOES = {  # on the way
    FirstUse.MEANS: "measuring its keys and values",
    FirstUse.PREDICTORS: "measuring its keys and values, and what a layer says of the next one",
    FirstUse.COORDINATES: "measuring its keys and values, and what the heads of a layer have in common",
}


def asked(kind: FirstUse) -> str:
    """Begin of an error: without them the program would not be what was asked for."""
    return f"{kind.word} are asked for ({kind.word}=on), and they cannot be fitted here:"


def folder() -> Path:
    """means/ in $KVQ_CACHE_DIR, else in $XDG_CACHE_HOME/ggml-kvq, else in ~/.cache/ggml-kvq."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(os.environ.get("KVQ_CACHE_DIR") or os.path.join(base, "ggml-kvq")) / "means"


def path_of(model: str | os.PathLike[str], kind: FirstUse = FirstUse.MEANS) -> Path:
    """Where the data of this model file are kept, named by what the file holds: a copy of another name is the same
    model. The library finds them there by itself (gguf/measured.cpp). KvqError.
    """
    return _look_up(model, kind)[0]


def there(model: str | os.PathLike[str]) -> str | None:
    """That file, if the model was measured."""
    for kind in (FirstUse.COORDINATES, FirstUse.MEANS):
        with suppress(KvqError):
            path, why = _look_up(model, kind)
            if not why:
                return str(path)
    return None


def usual() -> FirstUse:
    """What method auto goes best with on this machine."""
    return resolve(methods.library, Request(BY_FLAGS, budget.METHOD), None).first_use


def note_of_plain_data() -> str:
    """Of data without coordinates: what auto does not have with them. "": it has none on this machine."""
    return (
        "These data hold no coordinates. Without them, auto has coordinates on a CPU after a first use:"
        " compare both with ggml-kvq eval."
        if usual() is FirstUse.COORDINATES
        else ""
    )


def _lacks_order(there: Path, kind: FirstUse) -> bool:
    """Means of sorted keys without the order in which layers rise: an older version measured them."""
    fields = gguf_header.read(there).kvq() if kind is FirstUse.MEANS else {}
    return fields.get("kvq.auto.pairs") == "sorted" and "kvq.auto.order" not in fields


def _lacks_coordinates(there: Path, insist: bool) -> bool:
    """Neither coordinates nor the word that they do not pay: the model cannot have any. Who insists hears why."""
    return insist and not {"kvq.auto.coords", "kvq.aqua.coords"} & set(gguf_header.read(there).kvq())


def _look_up(model: str | os.PathLike[str], kind: FirstUse) -> tuple[Path, str]:
    """(where that is kept; "" or why what lies there cannot be used)."""
    lib = methods.library()
    there = c_char_p()
    status = lib.kvq_measured(os.fsencode(model), int(kind), byref(there))
    if not there.value:
        raise KvqError(native.last_error(lib))
    return Path(os.fsdecode(there.value)), native.last_error(lib) if status else ""


class _Progress:
    """A line of state: share done, and an estimate of what is left once some of it is."""

    def __init__(self, name: str, n_tokens: int, line: Line, share: float = 1.0) -> None:
        """n_tokens: to be read, which takes `share` of the whole."""
        self.name, self.total, self.line, self.share = name, n_tokens, line, share
        self.done, self.start = 0, time.monotonic()

    def __call__(self, n_tokens: int) -> None:
        self.done = min(self.done + n_tokens, self.total)
        self.say(self.share * self.done / self.total)

    def say(self, done: float) -> None:
        """done: share of the whole."""
        left = (time.monotonic() - self.start) * (1 / max(done, 1e-9) - 1)
        self.line(f"measuring {self.name}: {100 * done:.0f} %, about {left:.0f} s left")


@contextmanager
def _told(say: Callable[[str], object], line: Line) -> Iterator[None]:
    """A block that Ctrl-C or SIGTERM ends says what is left of it."""
    try:
        yield
    except (KeyboardInterrupt, _Terminated):
        line.end()
        say("stopped: nothing was kept")
        raise


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM unwinds the block, so that its temporary files go with it; then it ends the process as it would have."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def leave(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # timeout(1) sends it twice
        raise _Terminated

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Terminated(BaseException):
    """SIGTERM."""


def ensure(
    model: str | os.PathLike[str],
    say: Callable[[str], object],
    n_threads: int | None = None,
    line: Line | None = None,
    *,
    kind: FirstUse = FirstUse.MEANS,
    insist: bool = True,
) -> tuple[str | None, str]:
    """(sidecar, "") or (None, why not). Measures when the model is seen for the first time: seconds for small models. A
    file that is damaged is measured again. Nothing is written but that sidecar, whole or not at all. n_threads: None,
    all CPUs that the process may use. kind: what else is fitted; insist: where there can be no coordinates it is an
    error, else means alone do.
    """
    from . import files as disk

    try:
        there, why = _look_up(model, kind)
        if not why and not (
            _lacks_coordinates(there, insist) if kind is FirstUse.COORDINATES else _lacks_order(there, kind)
        ):
            return str(there), ""
        try:
            disk.probe(there)
        except KvqError as e:
            raise KvqError(f"{e}; or set KVQ_CACHE_DIR to a folder that is yours") from e
        name = os.path.basename(model)
        if why and there.is_file():
            say(f"{why.split(': make it again')[0]}: it is measured again")
        if kind is FirstUse.PREDICTORS:
            _refuse_gpu(kind)
        begin, times = (name, "again") if there.is_file() else (f"first use of {name}", "once")
        say(f"{begin}: {DOES[kind]}, {times} ({there})")
        line = line or Line(False)
        with _ended_by_sigterm(), _told(say, line):
            _fit(model, there, n_threads, line, kind, insist)
    except (KvqError, OSError) as e:
        why = str(e)
        for flags, cure in CURES.items():
            why = why.replace(flags, cure)
        if kind is not FirstUse.COORDINATES or insist:
            return None, why
        means, lacking = ensure(model, say, n_threads, line)
        if means:
            say(f"without coordinates: {why}")
        return means, lacking and why
    return str(there), ""


def _fit(
    model: str | os.PathLike[str], there: Path, n_threads: int | None, line: Line, kind: FirstUse, insist: bool
) -> None:
    from .calibrate.means import CannotHaveCoordinates

    try:
        FITS[kind](model, there, n_threads, line)
    except CannotHaveCoordinates:
        if insist:
            raise
        _measure(model, there, n_threads, line)


def _measure(model: str | os.PathLike[str], there: Path, n_threads: int | None, line: Line) -> None:
    """Means, and how keys are best split. KvqError, OSError."""
    from .calibrate import files, halves, means

    text = TEXT.read_text(encoding="utf-8")
    size: dict[str, Any] = {
        "n_threads": n_threads,
        "tick": _Progress(os.path.basename(model), 5 * LENGTH, line),
    }
    fitted = means.fit(model, text, n_sequences=1, length=LENGTH, sinks=SINKS, shorten=True, **size)
    fitted = halves.checked(model, fitted, text, **size)
    files.write_sidecar(there, files.fields(model, fitted, SINKS), files.arrays(fitted))


def _fit_coordinates(model: str | os.PathLike[str], there: Path, n_threads: int | None, line: Line) -> None:
    """Means, and as many coordinates as pay. Where none do, how keys are best split; what coordinates leave is sorted.
    KvqError, OSError.
    """
    from .calibrate import basis, files, halves, means

    tick = _Progress(os.path.basename(model), (SEQUENCES + 3) * LENGTH, line)
    size: dict[str, Any] = {"n_threads": n_threads, "tick": tick}
    text = "\n".join(path.read_text(encoding="utf-8") for path in (TEXT, MORE))
    fitted = means.fit(
        model, text, n_sequences=SEQUENCES, length=LENGTH, sinks=SINKS, shorten=True, coords=basis.AUTO, **size
    )
    by_speed, fitted.pairs = fitted.pairs, "sorted"
    fitted = halves.with_coordinates(model, fitted, text, **size)
    if not fitted.coords:
        tick.total += 4 * LENGTH
        fitted = halves.checked(model, replace(fitted, pairs=by_speed), text, **size)
    files.write_sidecar(there, files.fields(model, fitted, SINKS), files.arrays(fitted))


def _refuse_gpu(kind: FirstUse) -> None:
    """KvqError where the cache would lie on a GPU: the CPU alone reads them so far."""
    from .core.loader import libraries

    libs = libraries()
    where = next((libs.describe(name, handle) for name, _, handle in libs.devices() if name == "KVQ0"), "")
    if " over " in where:
        raise KvqError(f"{where} has no kernels for them; leave {kind.word}=on out, or hide the GPU")


def _fit_predictors(model: str | os.PathLike[str], there: Path, n_threads: int | None, line: Line) -> None:
    """Means and full predictors, of tokens that one pass reads; rows lie in a folder beside `there` meanwhile. Keys are
    sorted by what predictions leave; whether halves pay is not tried: behind predictors they always did. KvqError,
    OSError.
    """
    from .calibrate import capture, files, predictors

    def estimated(what: str, share: float) -> None:
        if not what.startswith("running"):  # which tick tells
            tick.say(share)

    text = "\n".join(path.read_text(encoding="utf-8") for path in (TEXT, MORE))
    tick = _Progress(os.path.basename(model), SEQUENCES * LENGTH, line, predictors.CAPTURING)
    source = capture.GgufSource(model, text, LENGTH, n_threads, tick)
    try:
        n = min(SEQUENCES, source.n_tokens() // LENGTH)
        length = LENGTH if n >= 4 else source.n_tokens() // 64 * 16  # four sequences: one is held out
        n = max(n, 4)
        tick.total = n * length
        there.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="rows-", dir=there.parent) as rows:
            size: dict[str, Any] = {"n_sequences": n, "length": length, "sinks": SINKS, "n_threads": n_threads}
            fitted = predictors.fit(source, folder=rows, progress=estimated, few=True, **size)
    finally:
        source.close()
    fitted.pairs = "none" if fitted.pairs == "none" else "sorted"
    meta = files.predictor_fields(model, fitted, predictors.Bits(), SINKS)
    meta["kvq.aqua.text"] = "of this package, on the model's first use"
    files.write_sidecar(there, meta, files.predictor_arrays(fitted))


FITS = {
    FirstUse.MEANS: _measure,
    FirstUse.PREDICTORS: _fit_predictors,
    FirstUse.COORDINATES: _fit_coordinates,
}
