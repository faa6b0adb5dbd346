"""What fit() is given: keys, values and queries of the model at hand, on a text."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ..core.model import Model
from ..default_means import TEXT
from ..errors import KvqError, LabError
from .method import Method
from .page import Decoded, LayerSample, Page, Rows, Sample

LENGTH = 2048  # tokens of a sequence
SINKS = 4  # first cells of each are left out: they are unlike all others


class _Recorder(Method):
    """Keeps what it sees and changes nothing."""

    window: int = 0
    wants_queries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.pages: dict[int, list[Page]] = {}
        self.parts: dict[int, list[tuple[Rows, Rows, Rows]]] = {}
        self.before: dict[int, int | None] = {}
        self.queries: dict[int, Rows] = {}
        self.pairs: dict[int, npt.NDArray[np.int64]] = {}

    def seal(self, page: Page) -> Decoded:
        use = page.positions >= SINKS
        rows = tuple(x[use].astype(np.float32) for x in (page.keys, page.keys_before, page.values))
        self.parts.setdefault(page.layer, []).append(rows)  # type: ignore[arg-type]
        self.before[page.layer] = page.layer_before
        self.queries[page.layer], self.pairs[page.layer] = page.queries.copy(), page.pairs
        return Decoded(page.keys, page.values, bits=16)


def take(path: str | os.PathLike[str], text: str, n_tokens: int, n_threads: int | None = None) -> Sample:
    """The sample of a model on a text file ("": the text of this package), at most n_tokens of it. KvqError."""
    file = Path(text) if text else TEXT
    if not file.is_file():
        raise LabError(f"text={text} is not a file; give a text that fit() learns from")
    found = os.stat(path)
    return _take(os.fspath(path), found.st_size, found.st_mtime_ns, str(file), n_tokens, n_threads)


@lru_cache(maxsize=1)  # several methods on one model share it
def _take(path: str, size: int, changed: int, file: str, n_tokens: int, n_threads: int | None) -> Sample:
    recorder = _Recorder()
    text = Path(file).read_text(encoding="utf-8", errors="replace")
    with Model(path, "lab", lab=recorder, n_ctx=LENGTH, n_ubatch=512, n_threads=n_threads) as model:
        ids = np.asarray(model.tokenize(text[: 16 * n_tokens]), np.int32)[:n_tokens]
        ids = ids[: len(ids) // 32 * 32]
        if len(ids) < 64:
            raise KvqError(f"{file} has {len(ids)} tokens; give 64 or more for fit()")
        for at in range(0, len(ids), LENGTH):
            part = ids[at : at + LENGTH]
            model.reset()
            for _ in model.feed(part, outputs=np.zeros(len(part), bool)):
                pass
    if not recorder.parts:
        raise LabError(f"{file}: no page of it was full; give a longer text for fit()")
    order = sorted(recorder.parts)
    n = min(sum(len(part[0]) for part in recorder.parts[layer]) for layer in order)  # windows may lag behind
    layers = []
    for layer in order:
        keys, keys_before, values = (np.concatenate(x)[:n] for x in zip(*recorder.parts[layer]))
        last = recorder.before[layer]
        before = None if last is None else order.index(last)
        queries, pairs = recorder.queries[layer], recorder.pairs[layer]
        layers.append(LayerSample(layer, keys, keys_before, values, queries, pairs, before))
    return Sample(tuple(layers))


@contextmanager
def explained(method: Method) -> Iterator[None]:
    """Errors of fit() name file and line."""
    try:
        yield
    except KvqError:
        raise
    except Exception as e:
        file = method.source("fit").rpartition(":")[0]
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if Path(f.filename).name == file]
        at = f"{file}:{lines[-1]}" if lines else method.source("fit")
        raise LabError(f"{at}: {type(method).__name__}.fit: {type(e).__name__}: {' '.join(str(e).split())}") from e
