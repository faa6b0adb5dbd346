"""Bases for coordinates (types/basis.h): what the rows of all heads of a layer have in common, in few numbers.

Keys before rotary embedding, less their means, are weighted by the square root of what an error in a channel costs a
logit: the queries' mean square there. With the covariance C of such rows, its largest eigenvalues L and their vectors U
the coordinates of a row x are

    z = R L^-1/2 U' w x        x' = w^-1 U L^1/2 R' z

R is a fixed rotation. Behind it the coordinates of a cell are about equally large, so they share one scale. Values y,
less their means, are read from the same coordinates by least squares; E z z' is the identity:

    y' = (E y z') z = (E y x') w U L^-1/2 R' z
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..reference.basis import ERROR

LEAST = 1e-4  # of the largest weight: what is smaller counts as that
AUTO = -1  # coordinates: as many as hold ENOUGH
#: Share of keys' weighted energy. On SmolLM2 more coordinates lose no less and are slower to read; on Qwen2.5-Coder
#: twice as many lose a quarter less (docs/decisions/coordinates.md).
ENOUGH = 0.9
MOST, MOST_OF_A_CELL = 64, 1024  # a head's share; KVQ_MAX_COORDS


@dataclass(frozen=True)
class Basis:
    """axes[j]: what a coordinate of 1 adds to a row, f32 [n, width]; left: energy of each channel that the decoded
    coordinates leave, f64 [width].
    """

    axes: np.ndarray
    left: np.ndarray


@dataclass(frozen=True)
class Bases:
    """Of the keys and the values of a layer; read[j]: what a coordinate of a key is read with, f32 [n, width]."""

    read: np.ndarray
    keys: Basis
    values: Basis


def rotation(n: int) -> np.ndarray:
    """Orthogonal f64 [n, n]: cosines whose signs change at random, the same for each n."""
    k = np.arange(n)
    cosines = np.sqrt(2 / n) * np.cos(np.pi / n * (k[None] + 0.5) * k[:, None])
    cosines[0] /= np.sqrt(2)
    return np.asarray(cosines * np.random.default_rng(n).choice([-1.0, 1.0], n))


def _weighted(covariance: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(square root of the weights, covariance of weighted keys)"""
    w = np.sqrt(np.maximum(weight, max(weight.max() * LEAST, 1e-30)))
    return w, covariance * w * w[:, None]


def most(width: int, heads: int) -> int:
    """The largest share of a head."""
    return min(MOST, (min(width, MOST_OF_A_CELL) + 2) // heads // 2 * 2)


def enough(layers: Sequence[tuple[np.ndarray, np.ndarray, int]]) -> int:
    """A head's share of coordinates that hold ENOUGH of the keys' energy, as a mean over layers. layers: (covariance,
    weight, heads) as fit() takes them.
    """
    held = []
    top = max(min(most(len(weight), heads) for _, weight, heads in layers), 4)
    for covariance, weight, heads in layers:
        values = np.maximum(np.linalg.eigvalsh(_weighted(covariance, weight)[1])[::-1], 0)
        counts = np.minimum(heads * np.arange(4, top + 1, 2) - 2, len(values))
        held.append(values.cumsum()[counts - 1] / max(values.sum(), 1e-30))
    return 4 + 2 * min(int((np.mean(held, 0) < ENOUGH).sum()), (top - 4) // 2)


def fit(covariance: np.ndarray, weight: np.ndarray, n: int, cross: np.ndarray, energy: np.ndarray) -> Bases:
    """covariance: f64 [width, width], of keys less their means; weight: f64 [width], what an error of theirs costs;
    cross: f64 [width, width of values], of keys and values; energy: f64 [width of values], values' mean squares.
    """
    w, weighted = _weighted(covariance, weight)
    values, vectors = np.linalg.eigh(weighted)
    size = np.sqrt(np.maximum(values[-n:], max(values[-1] * 1e-9, 1e-30)))
    turn, vectors = rotation(n), vectors[:, -n:]
    axes = turn @ (vectors * size).T / w
    read = turn @ (vectors / size).T * w
    known = axes.T @ read  # x' = known x, but for the coordinates' own error
    rest = np.eye(len(w)) - known
    left = np.einsum("ij,jk,ik->i", rest, covariance, rest) + ERROR * np.square(axes).sum(0)
    said = read @ cross
    left_of_values = np.maximum(energy - (1 - ERROR) * np.square(said).sum(0), 0)
    return Bases(
        read.astype(np.float32),
        Basis(axes.astype(np.float32), left),
        Basis(said.astype(np.float32), left_of_values),
    )
