"""What a laboratory method is given, and what it gives back. Arrays are float32; those of a Page are read only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]
Levels = tuple[int, int, int]


def pairs_of(n_dims: int, neox: bool) -> npt.NDArray[np.int64]:
    """Channels that rotary embedding turns together, int [n_dims / 2, 2], from the fastest pair to the slowest."""
    i = np.arange(n_dims // 2)
    return np.stack([i, i + n_dims // 2] if neox else [2 * i, 2 * i + 1], -1)


@dataclass(frozen=True)
class Before:
    """What the layer before (of the same cache) holds of the same cells, as it was decoded: keys behind and before
    rotary embedding, and values, [pages, cells, heads, size] of that layer.
    """

    keys: Rows
    keys_before: Rows
    values: Rows


class Page:
    """A run of pages of one layer and one sequence that seals at once, all KV heads together.

    keys, values: [pages, cells, heads, size], as the model made them (f16), keys behind rotary embedding; cells that
        hold nothing are zeros. positions: int32 [pages, cells], -1 for these. layer: number among the model's layers
        with attention; layer_before: of the layer before in the same cache, None: it is the first there. stream: of
        the cache, a sequence. numbers: of the pages in that stream. pairs: int [pairs, 2],
        channels that turn together.
    """

    def __init__(
        self,
        *,
        layer: int,
        layer_before: int | None,
        stream: int,
        numbers: list[int],
        positions: npt.NDArray[np.int32],
        keys: Rows,
        values: Rows,
        pairs: npt.NDArray[np.int64],
        ask: Callable[[str], Any],
        turn: Callable[[Rows, bool], Rows],
    ) -> None:
        self.layer, self.layer_before, self.stream, self.numbers = layer, layer_before, stream, numbers
        self.positions, self.keys, self.values, self.pairs = positions, keys, values, pairs
        self._ask, self._turn = ask, turn

    @property
    def valid(self) -> npt.NDArray[np.bool_]:
        """bool [pages, cells]: the cell holds a token."""
        return self.positions >= 0

    @cached_property
    def keys_before(self) -> Rows:
        """Keys before rotary embedding, [pages, cells, heads, size]."""
        return self._turn(self.keys, True)

    @cached_property
    def before(self) -> Before | None:
        """What the layer before holds of these cells; None in the first layer of a cache."""
        found: Before | None = self._ask("before")
        return found

    @cached_property
    def queries(self) -> Rows:
        """Mean square of the queries that this layer met so far, [heads, pairs]: how much an error of a pair of key
        channels costs. Of classes with `wants_queries = True`; AttributeError in others.
        """
        square: Rows = self._ask("queries")
        return square[:, self.pairs].mean(-1)

    def turn(self, keys_before: npt.ArrayLike) -> Rows:
        """Keys [pages, cells, heads, size] with the rotary embedding of their positions."""
        return self._turn(np.asarray(keys_before, np.float32), False)

    def where(self) -> str:
        """For messages: "layer 3, pages 4..7 of sequence 0, keys (4, 32, 3, 64), values (4, 32, 3, 64)"."""
        first, last = min(self.numbers), max(self.numbers)
        which = f"page {first}" if first == last else f"pages {first}..{last}"
        return (
            f"layer {self.layer}, {which} of sequence {self.stream}, keys {self.keys.shape}, values {self.values.shape}"
        )


@dataclass
class Decoded:
    """What `seal` gives back: the rows that the cache holds from now on, and what they would take.

    keys, or keys_before: [pages, cells, heads, size], behind or before rotary embedding. values: likewise. bits: of a
    value, all that is stored for it counted (codes, scales, indices): one number, or keys' and values'. key_levels,
    value_levels: (n, cells, channels), where that is so: a tile of so many cells by so many channels holds at most n
    distinct values; it is checked.
    """

    keys: npt.ArrayLike | None = None
    values: npt.ArrayLike | None = None
    bits: float | tuple[float, float] | None = None
    keys_before: npt.ArrayLike | None = None
    key_levels: Levels | None = None
    value_levels: Levels | None = None


@dataclass
class Cells:
    """All cells of one layer and one sequence when attention has read them.

    probabilities: [heads, cells], what the newest `n_observed` query tokens gave a cell, the mean over them and over
    the query heads of a KV head. n_queries: how many tokens that mean is of, so n_queries * probabilities is the
    attention that the cells got in this step. scores: what `scores` gave back for these cells the last time; 0 for new
    ones.
    positions: int32 [cells], -1 where there is nothing. sealed: bool [cells], may be evicted. held: bool [heads,
    cells], was not evicted.
    """

    layer: int
    stream: int
    positions: npt.NDArray[np.int32]
    sealed: npt.NDArray[np.bool_]
    held: npt.NDArray[np.bool_]
    probabilities: Rows
    scores: Rows
    n_queries: int


@dataclass(frozen=True)
class LayerSample:
    """One layer. keys (behind rotary embedding), keys_before, values: f32 [cells, heads, size]. queries: mean square
    of the queries it met, [heads, pairs]. pairs: int [pairs, 2], channels that turn together. before: place in
    Sample.layers of the layer before in the same cache, None: it is the first there.
    """

    layer: int
    keys: Rows
    keys_before: Rows
    values: Rows
    queries: Rows
    pairs: npt.NDArray[np.int64]
    before: int | None


@dataclass(frozen=True)
class Sample:
    """layers: in order, the same cells of each."""

    layers: tuple[LayerSample, ...]

    def __getitem__(self, layer: int) -> LayerSample:
        """The layer of this number."""
        return next(x for x in self.layers if x.layer == layer)


# ------------------------------------------------------------------ checks

MOST = 65504.0  # of f16


def rows_of(given: Any, name: str, like: Rows) -> Rows:
    """float32 of the shape of `like`; ValueError."""
    if given is None:
        raise ValueError(f"no {name} came back; give Decoded({name}=...)")
    out = np.asarray(given)
    if out.dtype.kind not in "fiu":
        raise ValueError(f"{name} are of type {out.dtype}; give numbers")
    if out.shape != like.shape:
        raise ValueError(f"{name} have the shape {out.shape}; give {like.shape} (pages, cells, heads, size)")
    out = out.astype(np.float32, copy=False)
    wrong = ~(np.abs(out) <= MOST)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(f"{name}{list(at)} is {out[at]}; f16 holds finite numbers up to {MOST:g}")
    return out


def bits_of(given: Any) -> tuple[float, float]:
    """Bits of keys and of values; ValueError."""
    if given is None:
        raise ValueError("no bits came back; give Decoded(..., bits=...): all that is stored for a value")
    pair = given if isinstance(given, tuple) else (given, given)
    try:
        k, v = (float(x) for x in pair)
    except (TypeError, ValueError):
        raise ValueError(f"bits={given!r} is no number; give the bits of a value, or (of keys, of values)") from None
    if not (0 <= k <= 32 and 0 <= v <= 32):
        raise ValueError(f"bits={given!r} is not within 0..32 bits of a value")
    return k, v


def check_levels(rows: Rows, levels: Levels | None, name: str) -> None:
    """ValueError when a tile has more distinct values than was said."""
    if levels is None:
        return
    n, cells, channels = levels
    pages, page, heads, size = rows.shape
    if n < 1 or cells < 1 or channels < 1 or page % cells or size % channels:
        raise ValueError(f"{name}={levels}: a page has {page} cells and a head {size} channels, which tiles divide")
    x = rows.reshape(pages, page // cells, cells, heads, size // channels, channels)
    x = np.sort(x.transpose(0, 1, 3, 4, 2, 5).reshape(pages, page // cells, heads, size // channels, -1), axis=-1)
    found = 1 + (np.diff(x, axis=-1) != 0).sum(-1)
    if found.max() > n:
        p, c, h, d = (int(i) for i in np.unravel_index(found.argmax(), found.shape))
        raise ValueError(
            f"{name}={levels}: {int(found.max())} distinct values in page {p}, cells from {c * cells}, head {h},"
            f" channels from {d * channels}"
        )


def check_bits(given: Rows, back: Rows, bits: float, name: str) -> None:
    """ValueError when many values came back as they were, which takes their 16 bits, and fewer are declared. A group's
    ends and zeros come back by themselves: a quarter is not looked at.
    """
    there = given != 0
    same = float(((given == back) & there).sum() / max(1, there.sum()))
    if same > 0.25 and bits < 8 * same:
        raise ValueError(
            f"{100 * same:.0f} % of the {name} came back as they were, which takes 16 bits each: {bits:g} bits are too"
            " few"
        )
