"""Means without calibration: for methods that go better with channel means (auto, specache), measured once per model
on a text that comes with this package, and kept in the user's cache folder.

Keys before rotary embedding and values have means that belong to the model far more than to the text: those of this
text leave 0.46 of the divergence of 2-bit caches, those of the very text's first 128 tokens 0.48
(docs/methods/auto.md).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from . import gguf_header
from .errors import KvqError

LENGTH = 1024  # tokens; a model whose vocabulary makes fewer of the text gets what there is
SINKS = 4
FORMAT = b"sorted"  # what such a file holds beside means
ENDS = 1 << 18  # bytes at either end of a model file that tell it from others
TEXT = Path(__file__).with_name("data") / "means.txt"


def folder() -> Path:
    """means/ in $KVQ_CACHE_DIR, else in $XDG_CACHE_HOME/ggml-kvq, else in ~/.cache/ggml-kvq."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(os.environ.get("KVQ_CACHE_DIR") or os.path.join(base, "ggml-kvq")) / "means"


def path_of(model: str | os.PathLike[str]) -> Path:
    """Where the means of this model file are kept. Named by what the file holds at both ends, by its weights (a
    fine-tune may differ between the ends alone) and by the text: a copy is the same model. KvqError.
    """
    from .calibrate import files

    weights = files.sketch(model).tobytes()
    with open(model, "rb") as f:
        head = f.read(ENDS)
        size = f.seek(0, os.SEEK_END)
        f.seek(max(0, size - ENDS))
        name = hashlib.sha256(str(size).encode() + FORMAT + head + f.read() + weights + TEXT.read_bytes()).hexdigest()
    return folder() / f"{Path(model).stem}-{name[:16]}.kvq.gguf"


def _is_whole(path: Path) -> bool:
    """False for a file that was cut off, too: it is measured again."""
    try:
        gguf_header.read(path, tensors=True).check_whole()
    except (KvqError, OSError):
        return False
    return True


def ensure(
    model: str | os.PathLike[str], say: Callable[[str], object], n_threads: int | None = None
) -> tuple[str | None, str]:
    """(sidecar, "") or (None, why not). Measures when the model is seen for the first time: LENGTH tokens of one pass,
    seconds for small models. Nothing is written but that sidecar, whole or not at all.
    """
    from . import files as disk
    from .calibrate import files, halves, means

    try:
        there = path_of(model)
        if _is_whole(there):
            return str(there), ""
        try:
            disk.probe(there)
        except KvqError as e:
            return None, f"{e}; or set KVQ_CACHE_DIR to a folder that is yours"
        say(f"first use of {os.path.basename(model)}: measuring its keys and values, once ({there})")
        text = TEXT.read_text(encoding="utf-8")
        fitted = means.fit(model, text, n_sequences=1, length=LENGTH, sinks=SINKS, n_threads=n_threads, shorten=True)
        fitted = halves.checked(model, fitted, text, n_threads)
        files.write_sidecar(there, files.fields(model, fitted, SINKS), files.arrays(fitted))
    except (KvqError, OSError) as e:
        return None, str(e)
    return str(there), ""
