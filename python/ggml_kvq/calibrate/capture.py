"""Keys before rotary embedding and values, as the model itself makes them, from the cache of an ordinary Model.

The model runs with method aqua, nothing subtracted and a window that holds the whole sequence, so every row is the
model's own f16.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .. import gguf_header
from ..core import kvstats, native
from ..core.model import Model
from ..errors import KvqError

MAX_LENGTH = 4096  # tokens of a sequence: the largest window


Tick = Callable[[int], object]  # told how many tokens were read


def open_model(path: str | os.PathLike[str], length: int, n_threads: int | None = None) -> Model:
    """A model whose cache keeps `length` rows as they come. Raises KvqError for a length no window holds."""
    if not 16 <= length <= MAX_LENGTH:
        raise KvqError(f"sequences of {length} tokens cannot be captured; choose 16 to {MAX_LENGTH}")
    opts = {"predictor": "none", "window": MAX_LENGTH, "sinks": 0}
    return Model(
        path,
        kv_method="aqua",
        kv_opts=opts,
        kv_config="none",
        n_ctx=-(-length // 256) * 256,
        n_batch=512,
        n_ubatch=512,
        n_threads=n_threads,
    )


def layers(path: str | os.PathLike[str]) -> list[tuple[int, int, int, int]]:
    """(layer, KV heads, key head size, value head size) of every layer that has a cache."""
    return gguf_header.attention_layers(gguf_header.read(path, tensors=True))


def stamp(path: str | os.PathLike[str]) -> list[Any]:
    """What tells a model file from another one of its name, and from itself before it was written again."""
    found = os.stat(path)
    return [os.path.basename(os.fspath(path)), found.st_size, found.st_mtime_ns]


def rows(model: Model, il: int, value: bool, cell: int, n: int, width: int) -> np.ndarray:
    """Rows of cells cell..cell+n-1, f32 [n, width]; keys come without rotary embedding."""
    kvq = model._libs.need_kvq()
    out = np.empty((n, width), np.float32)
    with kvstats.lock:
        for i in kvstats._numbers(id(model)):
            at = out.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            if kvq.kvq_cache_rows(i, il, int(value), 0, cell, n, at) == 0:
                return out
    raise KvqError(f"layer {il} has no cache to read: {native.last_error(kvq)}")


SPLITS = ("none", "norm", "neox")  # kvq_split


def pairs(model: Model, layers: list[int]) -> str:
    """Which channels of a key turn together, "norm" or "neox", after a text was decoded; "none" when some layer has no
    rotary embedding of the whole head.
    """
    kvq = model._libs.need_kvq()
    with kvstats.lock:
        found = {max(kvq.kvq_cache_split(i, il) for i in kvstats._numbers(id(model))) for il in layers}
    return SPLITS[max(found.pop(), 0)] if len(found) == 1 else "none"


@contextlib.contextmanager
def observed_queries(model: Model) -> Iterator[None]:
    """While it holds, the model's layers note what queries they meet. Of the whole process."""
    kvq = model._libs.need_kvq()
    kvq.kvq_observe_queries(1)
    try:
        yield
    finally:
        kvq.kvq_observe_queries(0)


def queries(model: Model, il: int, width: int) -> np.ndarray:
    """Mean square of the queries that layer `il` met, f64 [width] by KV head and channel (the mean over the head's
    query heads); zeros: none were noted.
    """
    kvq = model._libs.need_kvq()
    out = np.empty(width)
    with kvstats.lock:
        for i in kvstats._numbers(id(model)):
            if kvq.kvq_cache_queries(i, il, width, out.ctypes.data_as(ctypes.POINTER(ctypes.c_double))) == width:
                return out
    return np.zeros(width)


def groups(model: Model, shapes: Sequence[tuple[int, int, int, int]]) -> list[list[int]]:
    """Layers by cache: sliding-window layers have one of their own."""
    kvq, found = model._libs.need_kvq(), {}
    with kvstats.lock:
        for il, *_ in shapes:
            at = np.empty(0, np.float32).ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            found[il] = next(
                (i for i in kvstats._numbers(id(model)) if kvq.kvq_cache_rows(i, il, 0, 0, 0, 0, at) == 0), -1
            )
    return [[il for il in found if found[il] == i] for i in sorted(set(found.values()))]


def sequences(model: Model, text: str, n: int, length: int, seed: int) -> list[np.ndarray]:
    """n token sequences of `length`, cut from the text one after the other and drawn in an order the seed fixes.

    Raises KvqError when the text is too short.
    """
    ids = np.asarray(model.tokenize(text), np.int32)
    whole = len(ids) // length
    if whole < n:
        cure = f"lower --sequences to {whole}" if whole else f"lower --length to {len(ids)} and --sequences to 1"
        raise KvqError(
            f"the text has {len(ids)} tokens, {n} sequences of {length} need {n * length}; give more text or {cure}"
        )
    pick = np.random.default_rng(seed).permutation(whole)[:n]
    return [ids[i * length : (i + 1) * length] for i in pick]


def run(model: Model, tokens: np.ndarray, tick: Tick | None = None) -> None:
    """Fill the cache with one sequence."""
    model.reset()
    before = 0
    for _ in model.feed(tokens, outputs=np.zeros(len(tokens), bool)):
        if tick:
            tick(len(model.tokens) - before)
            before = len(model.tokens)


def each(
    model: Model, shapes: list[tuple[int, int, int, int]], tokens: np.ndarray, sinks: int, tick: Tick | None = None
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(layer, keys f32 [n, heads*size], values) of one sequence without its first `sinks` tokens: their rows are
    unlike all others and ruin a regression (they stay f16 in the cache).
    """
    run(model, tokens, tick)
    n = len(tokens) - sinks
    for il, heads, size_k, size_v in shapes:
        yield il, rows(model, il, False, sinks, n, heads * size_k), rows(model, il, True, sinks, n, heads * size_v)


class GgufSource:
    """Rows of a GGUF model for predictors.fit: the model itself writes them into a cache that keeps them as they
    come.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        text: str,
        length: int,
        n_threads: int | None = None,
        tick: Tick | None = None,
    ) -> None:
        self._tick = tick
        self.shapes = layers(path)
        self.key = ["gguf", *stamp(path), hashlib.sha256(text.encode()).hexdigest()]
        self._text = text
        self._model: Model | None = open_model(path, length, n_threads)
        self._watch = contextlib.ExitStack()
        self._watch.enter_context(observed_queries(self._model))
        self._groups = groups(self._model, self.shapes)

    def groups(self) -> list[list[int]]:
        return self._groups

    def n_tokens(self) -> int:
        """Of the text."""
        assert self._model is not None
        return len(self._model.tokenize(self._text))

    def tokens(self, n: int, length: int, seed: int) -> list[np.ndarray]:
        assert self._model is not None
        return sequences(self._model, self._text, n, length, seed)

    def rows(self, tokens: np.ndarray, sinks: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        assert self._model is not None
        return each(self._model, self.shapes, tokens, sinks, self._tick)

    def queries(self, il: int, width: int) -> np.ndarray:
        assert self._model is not None
        return queries(self._model, il, width)

    def pairs(self) -> str:
        assert self._model is not None
        return pairs(self._model, [il for il, *_ in self.shapes])

    def close(self) -> None:
        self._watch.close()
        if self._model is not None:
            self._model.close()
            self._model = None
