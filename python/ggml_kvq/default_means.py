"""Means without calibration: for methods that go better with channel means (auto, specache), measured once per model
on a text that comes with this package, and kept in the user's cache folder.

Keys before rotary embedding and values have means that belong to the model far more than to the text: those of this
text leave 0.46 of the divergence of 2-bit caches, those of the very text's first 128 tokens 0.48
(docs/methods/auto.md).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p
from pathlib import Path
from typing import Any

from . import gguf_header, methods, native
from .errors import KvqError
from .progress import Line

LENGTH = 1024  # tokens; a model whose vocabulary makes fewer of the text gets what there is
SINKS = 4
TEXT = Path(__file__).with_name("data") / "means.txt"


def folder() -> Path:
    """means/ in $KVQ_CACHE_DIR, else in $XDG_CACHE_HOME/ggml-kvq, else in ~/.cache/ggml-kvq."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(os.environ.get("KVQ_CACHE_DIR") or os.path.join(base, "ggml-kvq")) / "means"


def path_of(model: str | os.PathLike[str]) -> Path:
    """Where the means of this model file are kept, named by what the file holds: a copy of another name is the same
    model. The library finds them there by itself (host/measured.cpp). KvqError.
    """
    return _look_up(model)[0]


def there(model: str | os.PathLike[str]) -> str | None:
    """That file, if the model was measured."""
    try:
        path, why = _look_up(model)
    except KvqError:
        return None
    return None if why else str(path)


def _lacks_order(there: Path) -> bool:
    """Sorted keys without the order in which layers rise: an older version measured them."""
    fields = gguf_header.read(there).kvq()
    return fields.get("kvq.auto.pairs") == "sorted" and "kvq.auto.order" not in fields


def _look_up(model: str | os.PathLike[str]) -> tuple[Path, str]:
    """(path_of(), "" or why what lies there cannot be used)."""
    lib = methods.library()
    there = c_char_p()
    status = lib.kvq_measured(os.fsencode(model), byref(there))
    if not there.value:
        raise KvqError(native.last_error(lib))
    return Path(os.fsdecode(there.value)), native.last_error(lib) if status else ""


class _Progress:
    """A line of state: share done, and an estimate of what is left once some of it is."""

    def __init__(self, name: str, passes: int, line: Line) -> None:
        self.name, self.total, self.line = name, passes * LENGTH, line
        self.done, self.start = 0, time.monotonic()

    def __call__(self, n_tokens: int) -> None:
        self.done = min(self.done + n_tokens, self.total)
        left = (time.monotonic() - self.start) * (self.total / self.done - 1)
        self.line(f"measuring {self.name}: {100 * self.done // self.total} %, about {left:.0f} s left")


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
) -> tuple[str | None, str]:
    """(sidecar, "") or (None, why not). Measures when the model is seen for the first time: LENGTH tokens of five
    passes, seconds for small models. A file that is damaged is measured again. Nothing is written but that sidecar,
    whole or not at all. n_threads: None, all CPUs that the process may use.
    """
    from . import files as disk
    from .calibrate import files, halves, means

    try:
        there, why = _look_up(model)
        if not why and not _lacks_order(there):
            return str(there), ""
        try:
            disk.probe(there)
        except KvqError as e:
            return None, f"{e}; or set KVQ_CACHE_DIR to a folder that is yours"
        name = os.path.basename(model)
        if why and there.is_file():
            say(f"{why.split(': make it again')[0]}: it is measured again")
        begin, times = (name, "again") if there.is_file() else (f"first use of {name}", "once")
        say(f"{begin}: measuring its keys and values, {times} ({there})")
        text = TEXT.read_text(encoding="utf-8")
        line = line or Line(False)
        tick = _Progress(name, 5, line)
        size: dict[str, Any] = {"n_threads": n_threads, "tick": tick}
        with _ended_by_sigterm(), _told(say, line):
            fitted = means.fit(model, text, n_sequences=1, length=LENGTH, sinks=SINKS, shorten=True, **size)
            fitted = halves.checked(model, fitted, text, **size)
            files.write_sidecar(there, files.fields(model, fitted, SINKS), files.arrays(fitted))
    except (KvqError, OSError) as e:
        return None, str(e)
    return str(there), ""
