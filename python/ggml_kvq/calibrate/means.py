"""Channel means of un-rotated keys and of values (AQUA-KV's "bias only"), streamed: memory does not grow with the
number of tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import files, gguf_header, memory
from ..errors import KvqError
from ..progress import Line
from ..reference.auto import COORD_KEYS, SORTED_KEYS
from . import capture, ladder
from .basis import AUTO, Bases, enough, most
from .basis import fit as fit_bases
from .order import logit_errors, pair_channels, sorted_keys

FORMAT = 5  # of a checkpoint


class CannotHaveCoordinates(KvqError):
    """Of a model; of no use to try again."""

    def __init__(self) -> None:
        super().__init__("coordinates are for keys that turn as a whole, by one position; leave --coords out")


@dataclass
class Moments:
    """Sums over tokens of one lane, f64 [width]."""

    total: np.ndarray
    square: np.ndarray
    product: np.ndarray  # with the keys of the layer, [width of keys, width]; empty where it is not asked for

    @classmethod
    def of(cls, width: int, with_keys: int) -> Moments:
        return cls(np.zeros(width), np.zeros(width), np.zeros((with_keys, width) if with_keys else (0, 0)))

    def add(self, x: np.ndarray, keys: np.ndarray) -> None:
        if len(self.product):
            self.product += keys.T @ x
        self.total += x.sum(0, dtype=np.float64)
        self.square += np.einsum("ti,ti->i", x, x, dtype=np.float64)


@dataclass
class Means:
    """mean[il] = (keys f32 [width], values f32 [width]); removed[il] = share of the energy that the means carry,
    keys and values; rms[il] = root mean square of the rows; pairs: how keys are to be split, one of
    capture.SPLITS or "sorted"; order[il] = (channel, gain), f32 [width] each: how they can be sorted (order.py);
    climb: option `order` of method auto with sorted keys, in which their layers rise, "none" where it is not known;
    losses: divergence by `pairs`, where it was tried (halves.py); coords: option of method auto, None where they were
    not asked for; alone: layers that have no coordinates; bases[il]: of the others; left[il]: as order, of what
    coordinates leave of keys; climb_without: as climb, without coordinates.
    """

    mean: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    removed: dict[int, tuple[float, float]] = field(default_factory=dict)
    rms: dict[int, tuple[float, float]] = field(default_factory=dict)
    pairs: str = "none"
    order: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    climb: str = "none"
    climb_without: str = "none"
    losses: dict[str, float] = field(default_factory=dict)
    coords: int | None = None
    alone: list[int] = field(default_factory=list)
    bases: dict[int, Bases] = field(default_factory=dict)
    left: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    n_tokens: int = 0
    seconds: float = 0.0
    peak_mib: float = 0.0


def fit(
    path: str | os.PathLike[str],
    text: str,
    *,
    n_sequences: int = 64,
    length: int = 2048,
    sinks: int = 4,
    seed: int = 0,
    n_threads: int | None = None,
    shorten: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = False,
    tick: capture.Tick | None = None,
    coords: int = 0,
) -> Means:
    """Means over n_sequences of `length` tokens of the text.

    checkpoint: file that holds the sums so far; a run that finds one of the same model, text and numbers goes on where
    it stopped. It is the caller's to remove, when the means are written. coords: fit bases, too, of so many coordinates
    a head; AUTO: of as many as hold enough. shorten: a text of fewer tokens makes fewer sequences, or one that is
    shorter.
    Raises KvqError for a text that is too short or a model without attention.
    """
    started = time.monotonic()
    shapes = capture.layers(path)
    digest = hashlib.sha256(text.encode()).hexdigest()
    key = json.dumps([*capture.stamp(path), digest, n_sequences, length, sinks, seed, coords, FORMAT])
    if coords:
        _check_memory(shapes)
    sums = {
        (il, v): Moments.of(h * (dv if v else dk), h * dk * bool(coords)) for il, h, dk, dv in shapes for v in (0, 1)
    }
    turned = "none"
    before = {il: np.zeros(h * dk) for il, h, dk, _ in shapes}  # queries' mean squares, summed over sequences
    met = dict(before)
    done, store = 0, Path(checkpoint) if checkpoint else None
    saved = _load(store) if store else {}
    if str(saved.get("key")) == key:
        done, turned = int(saved["done"]), str(saved["pairs"])
        for (il, v), m in sums.items():
            m.total[:], m.square[:] = saved[f"{il}.{v}.total"], saved[f"{il}.{v}.square"]
            m.product[:] = saved[f"{il}.{v}.product"]
        before = {il: saved[f"{il}.queries"] for il in before}
        met = dict(before)
    line = Line(progress)
    with capture.open_model(path, length, n_threads) as model, capture.observed_queries(model):
        if shorten:
            there = len(model.tokenize(text))
            length = min(length, there // 16 * 16)
            n_sequences = min(n_sequences, there // length)
        chosen = capture.sequences(model, text, n_sequences, length, seed)
        number = {il: i for i, (il, *_) in enumerate(shapes)}
        groups = [{number[il] for il in group} for group in capture.groups(model, shapes)]
        for i in range(done, n_sequences):
            for il, keys, values in capture.each(model, shapes, chosen[i], sinks, tick):
                sums[il, 0].add(keys, keys)
                sums[il, 1].add(values, keys)
            for il in met:  # the library's are of all sequences since the model was opened
                met[il] = before[il] + capture.queries(model, il, len(before[il])) * (i + 1 - done)
            turned = capture.pairs(model, [il for il, *_ in shapes])
            if coords and turned == "none":
                raise CannotHaveCoordinates
            if store:
                _save(store, key, i + 1, turned, sums, met)
            if progress:
                left = (time.monotonic() - started) / (i + 1 - done) * (n_sequences - i - 1)
                line(f"calibrating: {i + 1}/{n_sequences} sequences, {left:.0f} s left")
    line.end()
    n = n_sequences * (length - sinks)
    out = Means(
        pairs=turned,
        n_tokens=n,
        seconds=time.monotonic() - started,
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )
    windowed = _windowed(path, groups) if coords else set()
    out.alone = [il for il, *_ in shapes if il in windowed]
    others = [x for x in shapes if x[0] not in windowed]
    known = _known(others, sums, met, n, n_sequences, turned, coords) if coords else {}
    n_coords = enough(list(known.values())) if coords == AUTO else coords
    out.coords = n_coords if coords else None
    errors: dict[int, list[float]] = {}
    without: dict[int, list[float]] = {}
    remains: dict[int, float] = {}  # share of values' energy that coordinates leave
    for ordinal, (il, heads, size, _) in enumerate(shapes):
        mean_k, mean_v = (sums[il, v].total / n for v in (0, 1))
        share_k, share_v = (
            float((m**2).sum() / max((sums[il, v].square / n).sum(), 1e-30)) for v, m in enumerate((mean_k, mean_v))
        )
        out.mean[il] = (mean_k.astype(np.float32), mean_v.astype(np.float32))
        out.removed[il] = (share_k, share_v)
        rms_k, rms_v = (float(np.sqrt((sums[il, v].square / n).mean())) for v in (0, 1))
        out.rms[il] = (rms_k, rms_v)
        if turned != "none" and met[il].any():
            keys = np.maximum(sums[il, 0].square / n - mean_k**2, 0).reshape(heads, size)
            queries = (met[il] / n_sequences).reshape(heads, size)
            order = sorted_keys(keys, queries, turned)
            out.order[il] = (order[0].reshape(-1), order[1].reshape(-1))
            without[ordinal] = logit_errors(keys, queries, turned, SORTED_KEYS)
            if il in known:
                energy = sums[il, 1].square / n - mean_v**2
                cross = sums[il, 1].product / n - np.outer(mean_k, mean_v)
                found = fit_bases(known[il][0], known[il][1], heads * n_coords - 2, cross, energy)
                out.bases[il] = found
                keys = found.keys.left.reshape(heads, size)
                order = sorted_keys(keys, queries, turned)
                out.left[il] = (order[0].reshape(-1), order[1].reshape(-1))
                remains[ordinal] = float(found.values.left.sum() / max(energy.sum(), 1e-30))
            errors[ordinal] = logit_errors(keys, queries, turned, COORD_KEYS) if coords else without[ordinal]
    if len(errors) == len(shapes):
        out.climb = _climb(errors, remains, bool(coords), groups)
        out.climb_without = _climb(without, {}, False, groups)
    return out


def without_coordinates(fitted: Means) -> Means:
    """The same means, whose keys and values have none."""
    return replace(fitted, coords=0, alone=[], bases={}, left={}, climb=fitted.climb_without)


def _climb(
    errors: Mapping[int, Sequence[float]], remains: Mapping[int, float], coords: bool, groups: Sequence[set[int]]
) -> str:
    """Means.climb. remains: of layers with coordinates, the share of values' energy that these leave."""
    rungs = ladder.of("sorted", coords)
    damage = ladder.estimated(errors, {il: ladder.VALUES * x for il, x in remains.items()})
    return rungs.text(ladder.climb_evenly(damage, rungs, groups))


def _check_memory(shapes: Sequence[tuple[int, int, int, int]]) -> None:
    """KvqError where the sums that coordinates are fitted on do not fit."""
    need = 24 * sum((h * dk) ** 2 + h * dk * h * dv for _, h, dk, dv in shapes)
    if need > memory.available() > 0:
        raise KvqError(f"coordinates need {need / 2**30:.1f} GiB of memory here; leave --coords out")


def _windowed(path: str | os.PathLike[str], groups: Sequence[set[int]]) -> set[int]:
    """Layers of a sliding window beside others, which coordinates are not worth their bytes for: so few cells count
    little among all bits, and have more for each.
    """
    layers = gguf_header.window(gguf_header.read(path))[1]
    return (layers or set()) if len(groups) > 1 else set()


def _known(
    shapes: Sequence[tuple[int, int, int, int]],
    sums: dict[tuple[int, int], Moments],
    met: dict[int, np.ndarray],
    n: int,
    n_sequences: int,
    turned: str,
    coords: int,
) -> dict[int, tuple[np.ndarray, np.ndarray, int]]:
    """Of each layer the covariance of its keys, what their errors cost, and its KV heads. KvqError."""
    if turned == "none" or not all(x.any() for x in met.values()):
        raise CannotHaveCoordinates
    out = {}
    for il, heads, size, _ in shapes:
        if coords > most(heads * size, heads):
            raise KvqError(
                f"--coords {coords} is more than layer {il} of {heads} heads of {size} can have; give at most"
                f" {most(heads * size, heads)}"
            )
        mean = sums[il, 0].total / n
        cost = _by_pair((met[il] / n_sequences).reshape(heads, size), turned).reshape(-1)
        out[il] = (sums[il, 0].product / n - np.outer(mean, mean), cost, heads)
    return out


def _by_pair(queries: np.ndarray, kind: str) -> np.ndarray:
    """Mean squares [heads, head_size], alike in both channels of a rotary pair: positions turn one into the other."""
    out = np.empty_like(queries)
    pairs = pair_channels(queries.shape[1], kind)
    out[:, pairs] = queries[:, pairs].mean(-1, keepdims=True)
    return out


def _save(
    store: Path,
    key: str,
    done: int,
    pairs: str,
    sums: dict[tuple[int, int], Moments],
    met: dict[int, np.ndarray],
) -> None:
    """Replace the checkpoint in one step: a killed run leaves the old one or the new one."""
    arrays: dict[str, Any] = {f"{il}.queries": x for il, x in met.items()}
    arrays |= {
        f"{il}.{v}.{name}": getattr(m, name) for (il, v), m in sums.items() for name in ("total", "square", "product")
    }
    with files.whole(store) as new, open(new, "wb") as f:
        np.savez(f, key=np.array(key), done=np.array(done), pairs=np.array(pairs), **arrays)


def _load(store: Path) -> dict[str, np.ndarray]:
    """A checkpoint; {} when there is none that can be read."""
    try:
        with np.load(store) as saved:
            return dict(saved)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile):
        return {}
