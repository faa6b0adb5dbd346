"""AQUA-KV's linear predictors (arXiv 2501.19392, section 3.1): ridge regression layer by layer, each on what the cache
will reconstruct of the layer before.

Rows of every layer are captured once into a folder on disk (f16, 2 * tokens * K and V width bytes) and read in chunks
from then on: memory holds one chunk and the sums of products, whatever the number of tokens; every token is read a
fixed number of times. A run that was killed goes on after the last sequence captured, or the last layer fitted.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .. import cpus, files
from ..core import kernels, loader
from ..errors import KvqError
from ..progress import Line
from ..reference import LATTICE, Codec, K, V
from ..reference.auto import SORTED_KEYS
from ..reference.codec import SPLIT_NORM
from . import ladder, weights
from .order import logit_errors, sorted_keys

CHUNK = 8192  # rows in memory
RIDGE = 1e-3  # of the mean diagonal of x x^T, as the paper's code has it
RIDGES = (RIDGE, 1e-2, 1e-1)  # those that are tried where there are few tokens
PAYS = 0.02  # least share of the variance that a predictor of few tokens has to explain, on rows held out
LEAST_LAYERS = 8  # of a cache, beside a larger one: fewer do not pay for the rows that they share (methods/auto.cpp)
SHARED = 18  # bits of a key and a value that predicted layers share: 8-bit rows, and more bits of the first, at least 2
CAPTURING = 0.6  # of the time, as far as progress is told: running the model
SIZES = (8, 16, 32)  # numbers of sequences at which the gain is measured beside the whole

Shape = tuple[int, int, int, int]  # layer, KV heads, key head size, value head size
Order = tuple[np.ndarray, np.ndarray]
Bar = Callable[[str, float], object]
#: Bits of the weak and of the strong half of sorted keys, by bits on average; others are one block.
HALVES = {2: (1, 3), 3: (2, 4)}


class Source(Protocol):
    """Where rows come from: a GGUF model through its cache, or a Hugging Face model."""

    shapes: list[Shape]
    key: list[Any]

    def tokens(self, n: int, length: int, seed: int) -> list[np.ndarray]: ...
    def rows(self, tokens: np.ndarray, sinks: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]: ...
    def groups(self) -> list[list[int]]: ...
    def queries(self, il: int, width: int) -> np.ndarray: ...
    def pairs(self) -> str: ...
    def close(self) -> None: ...


@dataclass
class Layer:
    """mean: f32 [width] of keys, values; rms: of their rows. weight: raw rows as GGUF holds them ("f16" or "q4_0"),
    None in the first layer. order, left: (channel, gain) f32 [heads, head_size] of keys, and of what their prediction
    leaves (order.py); None where the queries are not known.
    errors: of a logit on each rung of sorted keys (order.logit_errors): nothing predicted, or what few tokens leave.
    explained: share of the variance (keys, values) on sequences that were not fitted; gain: the same by number of
    sequences.
    """

    mean: tuple[np.ndarray, np.ndarray]
    weight: list[np.ndarray | None] = field(default_factory=lambda: [None, None])
    prev: int = -1
    explained: list[float] = field(default_factory=lambda: [0.0, 0.0])
    gain: dict[int, list[float]] = field(default_factory=dict)
    rms: tuple[float, float] = (0.0, 0.0)
    order: Order | None = None
    left: Order | None = None
    errors: list[float] = field(default_factory=list)


@dataclass
class Fit:
    """pairs: which channels of a key turn together, norm or neox; none: keys stay whole. groups: layers by cache;
    alone: those of caches in which method auto predicts nothing. few: as fit() has it.
    """

    layers: dict[int, Layer] = field(default_factory=dict)
    predictor: str = "full"
    pairs: str = "none"
    groups: list[list[int]] = field(default_factory=list)
    alone: list[int] = field(default_factory=list)
    format: str = "f16"
    few: bool = False
    n_tokens: int = 0
    seconds: float = 0.0
    seconds_capture: float = 0.0
    peak_mib: float = 0.0
    disk_mib: float = 0.0

    def climb(self) -> str:
        """Option `order` of method auto with these data, "none" where it is not known. That of rows as they are serves
        with predictions too: it takes a third of the divergence away (docs/methods/auto.md). With `few`, whose data
        nothing else reads, it is the order of what predictions leave.
        """
        if self.pairs != "sorted" or not all(x.errors for x in self.layers.values()):
            return "none"
        rungs, number = ladder.of("sorted"), {il: i for i, il in enumerate(sorted(self.layers))}
        predicted = set(self.layers) - set(self.alone) if self.few else set()
        left = {number[il]: 1.0 - self.layers[il].explained[1] for il in predicted}
        damage = ladder.estimated({i: self.layers[il].errors for il, i in number.items()}, left)
        # bits are counted over all layers: what the predicted ones share is in them, and others may have as much
        shared = SHARED / max(len(self.layers) - len(self.alone), 1)
        ahead = [shared if set(g) <= set(self.alone) else 0.0 for g in self.groups]
        groups = [{number[il] for il in g} for g in self.groups]
        return rungs.text(ladder.climb_evenly(damage, rungs, groups, ahead))


@dataclass(frozen=True)
class Bits:
    """Code bits of the cache that will be used: residuals are formed against what it reconstructs."""

    k: int = 2
    v: int = 2
    first: int = 4

    def codec(self, role: int, ordinal: int, head_size: int) -> Codec:
        own = self.v if role == V else self.k
        return Codec(LATTICE, role, max(own, self.first) if ordinal == 0 else own, 2, 1, 0, 0.0, 32, head_size)

    def halves(self, head_size: int) -> Codec | None:
        """Of sorted keys, as method auto has them; None: there are no halves of so many bits, or of such heads."""
        if self.k not in HALVES or head_size % 32:
            return None
        weak, strong = HALVES[self.k]
        return self.codec(K, 1, head_size).with_(bits=strong, split=SPLIT_NORM, fast_bits=weak)


class Products:
    """Sums over rows of x x^T, x y^T and y^2; of the rows that are fitted and of those held out."""

    def __init__(self, n_in: int, n_out: int) -> None:
        self.xx = [np.zeros((n_in, n_in)) for _ in range(2)]
        self.xy = [np.zeros((n_in, n_out)) for _ in range(2)]
        self.yy = [0.0, 0.0]
        self.kept: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def add(self, x: np.ndarray, y: np.ndarray, held_out: bool) -> None:
        i = int(held_out)
        self.xx[i] += x.T @ x
        self.xy[i] += x.T @ y
        self.yy[i] += float(np.einsum("ti,ti->", y, y, dtype=np.float64))

    def keep(self, n: int) -> None:
        self.kept[n] = (self.xx[0].copy(), self.xy[0].copy())

    def explained(self, w: np.ndarray) -> float:
        """1 - |y - W x|^2 / |y|^2 on rows held out, or on all when there are none; w [n_out, n_in]."""
        i = 1 if self.yy[1] else 0
        w = w.astype(np.float64)
        left = (
            self.yy[i]
            - 2 * np.einsum("oi,io->", w, self.xy[i])
            + np.einsum("oi,ij,oj->", w, self.xx[i], w, optimize=True)
        )
        return float(1 - left / max(self.yy[i], 1e-30))

    def of_few(self) -> tuple[np.ndarray, float]:
        """(W, share of the variance): with that of RIDGES which explains most of the rows held out, fitted again on all
        rows; zeros where that is less than PAYS.
        """
        tries = {by: self.explained(ridge(self.xx[0], self.xy[0], by)) for by in RIDGES}
        by = max(tries, key=lambda x: tries[x])
        if not tries[by] >= PAYS:
            return np.zeros(self.xy[0].T.shape), 0.0
        return ridge(self.xx[0] + self.xx[1], self.xy[0] + self.xy[1], by), tries[by]


def ridge(xx: np.ndarray, xy: np.ndarray, share: float = RIDGE) -> np.ndarray:
    """W [n_out, n_in], f64. share: what is added to the diagonal, of its mean."""
    damp = share * np.trace(xx) / len(xx)
    return np.linalg.solve(xx + max(damp, 1e-12) * np.eye(len(xx)), xy).T


class Store:
    """Rows on disk, f16, one file a lane; `name` is e.g. k.3 (captured) or k.3.rec (reconstructed, less the mean)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.f16"

    def write_at(self, name: str, row: int, x: np.ndarray) -> None:
        path = self.path(name)
        data = np.clip(x, -65504, 65504).astype("<f2").tobytes()
        try:
            with open(path, "r+b" if path.exists() else "w+b") as f:
                f.seek(row * x.shape[1] * 2)
                f.write(data)
        except OSError as e:
            raise files.refuse(path, e, len(data)) from e

    def read(self, name: str, row: int, n: int, width: int) -> np.ndarray:
        with open(self.path(name), "rb") as f:
            f.seek(row * width * 2)
            x = np.fromfile(f, "<f2", n * width)
        if x.size != n * width:
            raise KvqError(f"{self.path(name)} is cut off; remove {self.folder} and calibrate again")
        return x.reshape(n, width).astype(np.float32)

    def drop(self, *names: str) -> None:
        for name in names:
            self.path(name).unlink(missing_ok=True)


class Progress:
    """One line on stderr: share of the work done, time left."""

    def __init__(self, show: bool) -> None:
        self.line, self.started, self.first = Line(show), time.monotonic(), -1.0

    def __call__(self, what: str, share: float) -> None:
        if self.first < 0:
            self.first = share
        spent, part = time.monotonic() - self.started, share - self.first
        left = f", {spent / part * (1 - share):.0f} s left" if part > 0.02 else ""
        full = int(30 * share)
        self.line(f"calibrating [{'#' * full}{'.' * (30 - full)}] {100 * share:3.0f}%{left} ({what})")

    def end(self) -> None:
        self.line.end()


def fit(
    source: Source,
    *,
    predictor: str = "full",
    bits: Bits | None = None,
    form: str = "f16",
    n_sequences: int = 64,
    length: int = 2048,
    sinks: int = 4,
    seed: int = 0,
    folder: str | os.PathLike[str],
    n_threads: int | None = None,
    progress: bool | Bar = False,
    few: bool = False,
) -> Fit:
    """Fit predictors ("k", "full" or "fold") of every layer but the first of each group, in f16 or q4_0.

    folder: where rows and finished layers are kept until the end; a folder left by a killed run of the same numbers is
    continued. One sequence in eight is held out to measure explained variance. progress: True: a line on stderr; else
    told what is done and which share of the work. few: there are only a few thousand tokens; the last quarter of the
    sequences is held out to choose how much each predictor is damped, and whether it pays at all; then all sequences
    count, and layers of a cache that has fewer than LEAST_LAYERS beside a larger one have none (else they have, for
    method aqua). Raises KvqError for layers of unequal width or too little text.
    """
    bits = bits or Bits()
    started = time.monotonic()
    n_threads = n_threads or cpus.available()
    place = Path(folder)
    key = json.dumps([source.key, predictor, [bits.k, bits.v, bits.first], form, n_sequences, length, sinks, seed, few])
    store, line = Store(place), Progress(progress is True)
    bar = progress if callable(progress) else line
    per = length - sinks
    shapes = {s[0]: s for s in source.shapes}
    groups = source.groups()
    for group in groups:
        for a, b in itertools.pairwise(group):
            if any(shapes[a][1] * shapes[a][i] != shapes[b][1] * shapes[b][i] for i in (2, 3)):
                raise KvqError(
                    f"layers {a} and {b} have KV rows of unequal width, which no predictor of this method takes; use"
                    " --predictor bias"
                )
            if form == "q4_0" and any(shapes[b][1] * shapes[b][i] % weights.GROUP for i in (2, 3)):
                raise KvqError(
                    f"layer {b} has KV rows that are no multiple of {weights.GROUP} wide, as q4_0 has its blocks; use"
                    " --weights f16"
                )
    if not (place / "key.json").is_file() or (place / "key.json").read_text() != key:
        clear(place)
    place.mkdir(parents=True, exist_ok=True)
    (place / "key.json").write_text(key)
    try:
        captured = _capture(source, store, place, n_sequences, length, sinks, seed, bar)
    except KvqError:
        if not (place / "captured").is_file():
            clear(place)
        raise
    spent = time.monotonic() - started
    total = n_sequences * per
    out = Fit(predictor=predictor, format=form, few=few, n_tokens=total, seconds_capture=spent)
    out.disk_mib = captured / 2**20
    work = _Work(store, total, per, n_sequences, bits, form, n_threads, bar, sum(len(g) for g in groups), few)
    work.pairs, work.queries = _load_queries(place)
    out.pairs, out.groups = work.pairs, groups
    most = max(len(group) for group in groups)
    out.alone = [il for g in groups if len(g) < min(LEAST_LAYERS, most) for il in g]
    for group in groups:
        for ordinal, il in enumerate(group):
            saved = place / f"layer.{il}.npz"
            before = group[ordinal - 1] if ordinal else -1
            how = (0, -1, "none") if few and il in out.alone else (ordinal, before, predictor)
            out.layers[il] = _load(saved) if saved.is_file() else work.layer(shapes[il], *how)
            if not saved.is_file():
                _save(saved, out.layers[il])
            if ordinal:
                store.drop(*(f"{v}.{before}.rec" for v in "kv"))
            store.drop(f"k.{il}", f"v.{il}")
            work.done += 1
    line.end()
    out.seconds = time.monotonic() - started
    out.peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return out


OWN = re.compile(r"(key\.json|queries\.npz|captured(\.new)?|[kv]\.\d+(\.rec)?\.f16|layer\.\d+\.npz|new\.npz)")


def clear(folder: Path) -> None:
    """Remove what fit() keeps in `folder`, and the folder when nothing else lies there."""
    with suppress(OSError):
        for path in [p for p in folder.iterdir() if OWN.fullmatch(p.name)]:
            path.unlink()
        folder.rmdir()


def _capture(source: Source, store: Store, place: Path, n: int, length: int, sinks: int, seed: int, bar: Bar) -> int:
    """Rows of n sequences on disk; bytes of them."""
    mark = place / "captured"
    done = int(mark.read_text()) if mark.is_file() else 0
    size = sum(2 * s[1] * (s[2] + s[3]) for s in source.shapes) * n * (length - sinks)
    if done < n:
        free = shutil.disk_usage(place).free
        if size * 1.15 > free:
            raise KvqError(
                f"captured rows need {size >> 20} MiB in {place}, {free >> 20} are free; lower --sequences or give"
                " --work another folder"
            )
        chosen = source.tokens(n, length, seed)
        for i in range(done, n):
            for il, k, v in source.rows(chosen[i], sinks):
                store.write_at(f"k.{il}", i * (length - sinks), k)
                store.write_at(f"v.{il}", i * (length - sinks), v)
            _save_queries(place, source)
            _replace(mark, str(i + 1))
            bar(f"running the model, sequence {i + 1} of {n}", CAPTURING * (i + 1) / n)
    source.close()
    return size


def _save_queries(place: Path, source: Source) -> None:
    """Mean squares of the queries that this run has met."""
    met = {str(s[0]): source.queries(s[0], s[1] * s[2]) for s in source.shapes}
    np.savez(place / "new.npz", pairs=np.array(source.pairs()), **met)  # type: ignore[arg-type]
    os.replace(place / "new.npz", place / "queries.npz")


def _load_queries(place: Path) -> tuple[str, dict[int, np.ndarray]]:
    """(pairs, mean squares by layer); "none" where they are not known."""
    with np.load(place / "queries.npz") as saved:
        met = {int(name): saved[name] for name in saved.files if name != "pairs"}
        return (str(saved["pairs"]) if all(x.any() for x in met.values()) else "none"), met


def _replace(path: Path, text: str) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    os.replace(new, path)


class _Work:
    def __init__(
        self,
        store: Store,
        total: int,
        per: int,
        n_seq: int,
        bits: Bits,
        form: str,
        n_threads: int,
        bar: Bar,
        n_layers: int,
        few: bool = False,
    ) -> None:
        self.store, self.total, self.per, self.n_seq = store, total, per, n_seq
        self.bits, self.form, self.n_threads, self.bar, self.n_layers = bits, form, n_threads, bar, n_layers
        self.lib = loader.libraries().need_kvq()
        self.done, self.at = 0, -1  # layers, and the one that is fitted
        self.pairs, self.queries = "none", dict[int, np.ndarray]()
        self.few = few
        self.n_fit = n_seq - (max(1, n_seq // 4) if few else n_seq // 8)  # the last sequences are held out
        self.n_mean = n_seq if few else self.n_fit  # of which means and energies are
        self.starts = [(i * per + a, min(CHUNK, per - a), i) for i in range(n_seq) for a in range(0, per, CHUNK)]

    def chunks(self) -> Iterator[tuple[int, int, int]]:
        """(first row, rows, sequence)."""
        return iter(self.starts)

    def centred(self, name: str, mean: np.ndarray, row: int, n: int) -> np.ndarray:
        return self.store.read(name, row, n, len(mean)) - mean

    def mean(self, name: str, width: int) -> tuple[np.ndarray, float]:
        """Mean of every channel, and the rows' root mean square."""
        total, square = np.zeros(width), 0.0
        for row, n, seq in self.chunks():
            if seq < self.n_mean:
                x = self.store.read(name, row, n, width)
                total += x.sum(0, dtype=np.float64)
                square += float(np.einsum("ti,ti->", x, x, dtype=np.float64))
        rows = self.n_mean * self.per
        return (total / rows).astype(np.float32), float(np.sqrt(square / (rows * width)))

    def rebuilt(self, codec: Codec, y: np.ndarray, pred: np.ndarray | None, order: Order | None = None) -> np.ndarray:
        """What the cache gives back for y when pred is subtracted first; order: of sorted keys."""
        left = y if pred is None else y - pred
        if order is not None:
            channel = (order[0] + codec.head_size * np.arange(len(order[0]))[:, None]).reshape(-1).astype(int)
            gain = order[1].reshape(-1)
            back = np.empty_like(left)
            back[:, channel] = kernels.round_trip(self.lib, codec, left[:, channel] * gain, self.n_threads) / gain
        else:
            back = kernels.round_trip(self.lib, codec, left, self.n_threads)
        return back if pred is None else pred + back

    def orders(
        self, shape: Shape, p: Products | None, w: np.ndarray | None, squares: np.ndarray, n: int
    ) -> tuple[list[Order], list[float]]:
        """Of keys whose squares less their mean sum up to `squares` over n rows, and of what w leaves of them; and
        Layer.errors.
        """
        il, heads, size, _ = shape
        q = self.queries[il].reshape(heads, size)
        left = squares
        if p is not None and w is not None:  # |y - W x|^2 by channel, from sums of products
            x = w.astype(np.float64)
            xx, xy = (a[0] + a[1] if self.few else a[0] for a in (p.xx, p.xy))
            left = squares - 2 * np.einsum("oi,io->o", x, xy) + np.einsum("oi,ij,oj->o", x, xx, x, optimize=True)
        both = [np.maximum(e, 0).reshape(heads, size) / n for e in (squares, left)]
        counts = both[1] if self.few else both[0]
        return [sorted_keys(e, q, self.pairs) for e in both], logit_errors(counts, q, self.pairs, SORTED_KEYS, False)

    def solve(self, out: Layer, lane: int, p: Products) -> np.ndarray:
        """The predictor of keys (lane 0) or values as f32 [n_out, n_in], and `out` with its raw rows for GGUF."""
        name = f"{'values' if lane else 'keys'} of layer {self.at}"
        w, share = p.of_few() if self.few else (ridge(p.xx[0], p.xy[0]), 0.0)
        if not np.isfinite(w).all():
            raise KvqError(
                f"the regression of {name} gives values that are not finite; the text holds too little variety"
            )
        raw = out.weight[lane] = weights.to_f16(w) if self.form == "f16" else weights.to_q4_0(w, p.xx[0])
        w = weights.to_f32(raw, self.form)
        if self.few:
            out.explained[lane] = share
        else:
            self.measure(out, lane, p, w)
        return w

    def layer(self, shape: Shape, ordinal: int, prev: int, predictor: str) -> Layer:
        il, heads, size_k, size_v = shape
        wk, wv = heads * size_k, heads * size_v
        self.at = il
        self.bar(f"layer {il}", CAPTURING + (1 - CAPTURING) * self.done / self.n_layers)
        (mean_k, rms_k), (mean_v, rms_v) = self.mean(f"k.{il}", wk), self.mean(f"v.{il}", wv)
        out = Layer((mean_k, mean_v), prev=prev, rms=(rms_k, rms_v))
        values, fold, bits = predictor in ("full", "fold"), predictor == "fold", 8 if self.form == "f16" else 4
        below = f"k.{prev}.rec" if fold else f"v.{prev}.rec"  # what values are predicted from beside their keys
        w_below = wk if fold else wv
        codecs = [self.bits.codec(role, ordinal, size) for role, size in ((K, size_k), (V, size_v))]
        k_pred = v_pred = None
        w: np.ndarray | None = None
        squares, n_squares = np.zeros(wk), 0
        of_keys = Products(wk, wk) if ordinal else None
        for row, n, seq in self.chunks():
            y = self.centred(f"k.{il}", out.mean[0], row, n)
            if seq < self.n_mean:
                squares += np.einsum("ti,ti->i", y, y, dtype=np.float64)
                n_squares += n
            if of_keys is not None:
                self.note(of_keys, seq, row)
                of_keys.add(self.store.read(f"k.{prev}.rec", row, n, wk), y, seq >= self.n_fit)
        if of_keys is not None:
            w = self.solve(out, 0, of_keys)
            k_pred = kernels.pack_weights(self.lib, w, bits)
        order, halves = None, self.bits.halves(size_k) if ordinal else None
        if self.pairs != "none":
            (out.order, out.left), out.errors = self.orders(shape, of_keys, w, squares, n_squares)
            if halves is not None:
                order, codecs[0] = out.left, halves
        p = Products(wk + w_below, wv)
        for row, n, seq in self.chunks():
            y = self.centred(f"k.{il}", out.mean[0], row, n)
            pred = (
                None
                if k_pred is None
                else kernels.predict(
                    self.lib, k_pred, self.store.read(f"k.{prev}.rec", row, n, wk), None, self.n_threads
                )
            )
            k = self.rebuilt(codecs[0], y, pred, order)
            self.store.write_at(f"k.{il}.rec", row, k)
            if ordinal and values:
                self.note(p, seq, row)
                x = np.concatenate([k, self.store.read(below, row, n, w_below)], 1)
                p.add(x, self.centred(f"v.{il}", out.mean[1], row, n), seq >= self.n_fit)
        if not values:
            return out
        parts: Sequence[kernels.Weights] = ()
        if ordinal:
            w = self.solve(out, 1, p)
            parts = [kernels.pack_weights(self.lib, x, bits) for x in (w[:, :wk], w[:, wk:])]
        if fold:  # nothing is predicted from values
            return out
        for row, n, _ in self.chunks():
            y = self.centred(f"v.{il}", out.mean[1], row, n)
            v_pred = None
            if ordinal:
                v_pred = kernels.predict(
                    self.lib, parts[0], self.store.read(f"k.{il}.rec", row, n, wk), None, self.n_threads
                )
                v_pred = kernels.predict(
                    self.lib, parts[1], self.store.read(f"v.{prev}.rec", row, n, wv), v_pred, self.n_threads
                )
            self.store.write_at(f"v.{il}.rec", row, self.rebuilt(codecs[1], y, v_pred))
        return out

    def note(self, p: Products, seq: int, row: int) -> None:
        """The sums so far, before the sequence that would exceed one of SIZES."""
        if row == seq * self.per and seq in SIZES and seq < self.n_fit:
            p.keep(seq)

    def measure(self, out: Layer, lane: int, p: Products, w: np.ndarray) -> None:
        out.explained[lane] = p.explained(w)
        for n, (xx, xy) in [*p.kept.items()]:
            out.gain.setdefault(n, [0.0, 0.0])[lane] = p.explained(ridge(xx, xy))
        out.gain.setdefault(self.n_fit, [0.0, 0.0])[lane] = out.explained[lane]


def _save(path: Path, layer: Layer) -> None:
    new = path.with_name("new.npz")
    arrays: dict[str, Any] = {f"weight{i}": w for i, w in enumerate(layer.weight) if w is not None}
    arrays |= {"mean0": layer.mean[0], "mean1": layer.mean[1], "prev": layer.prev, "rms": layer.rms}
    for name, order in (("order", layer.order), ("left", layer.left)):
        arrays |= {name: np.stack(order)} if order is not None else {}
    arrays |= {
        "errors": layer.errors,
        "explained": layer.explained,
        "gain": [[n, *g] for n, g in sorted(layer.gain.items())],
    }
    with open(new, "wb") as f:
        np.savez(f, **{name: np.asarray(value) for name, value in arrays.items()})  # type: ignore[arg-type]
    os.replace(new, path)


def _load(path: Path) -> Layer:
    with np.load(path) as z:
        return Layer(
            (z["mean0"], z["mean1"]),
            [z.get(f"weight{i}") for i in range(2)],
            int(z["prev"]),
            [float(x) for x in z["explained"]],
            {int(row[0]): [float(row[1]), float(row[2])] for row in z["gain"]},
            tuple(float(x) for x in z["rms"]) if "rms" in z else (0.0, 0.0),  # type: ignore[arg-type]
            tuple(z["order"]) if "order" in z else None,
            tuple(z["left"]) if "left" in z else None,
            [float(x) for x in z["errors"]] if "errors" in z else [],
        )
