"""Bases for coordinates (types/basis.h): what the rows of all heads of a layer have in common, in few numbers.

Keys before rotary embedding, less their means, are weighted by the square root of what an error in a channel costs a
logit: the queries' mean square there. Values are not weighted. With the covariance C of such rows, its largest
eigenvalues L and their vectors U the coordinates of a row x are

    z = R L^-1/2 U' w x        x' = w^-1 U L^1/2 R' z

R is a fixed rotation. Behind it the coordinates of a cell are about equally large, so they share one scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..reference.basis import ERROR

LEAST = 1e-4  # of the largest weight: what is smaller counts as that


@dataclass(frozen=True)
class Basis:
    """axes[j]: what a coordinate of 1 adds to a row; read[j]: what it is read with; f32 [n, width]. left: energy of
    each channel that the decoded coordinates leave, f64 [width].
    """

    axes: np.ndarray
    read: np.ndarray
    left: np.ndarray


def rotation(n: int) -> np.ndarray:
    """Orthogonal f64 [n, n]: cosines whose signs change at random, the same for each n."""
    k = np.arange(n)
    cosines = np.sqrt(2 / n) * np.cos(np.pi / n * (k[None] + 0.5) * k[:, None])
    cosines[0] /= np.sqrt(2)
    return np.asarray(cosines * np.random.default_rng(n).choice([-1.0, 1.0], n))


def fit(covariance: np.ndarray, weight: np.ndarray, n: int) -> Basis:
    """covariance: f64 [width, width], of rows less their means; weight: f64 [width], what an error costs."""
    w = np.sqrt(np.maximum(weight, max(weight.max() * LEAST, 1e-30)))
    values, vectors = np.linalg.eigh(covariance * w * w[:, None])
    size = np.sqrt(np.maximum(values[-n:], max(values[-1] * 1e-9, 1e-30)))
    turn, vectors = rotation(n), vectors[:, -n:]
    axes = turn @ (vectors * size).T / w
    read = turn @ (vectors / size).T * w
    known = axes.T @ read  # x' = known x, but for the coordinates' own error
    rest = np.eye(len(w)) - known
    left = np.einsum("ij,jk,ik->i", rest, covariance, rest) + ERROR * np.square(axes).sum(0)
    return Basis(axes.astype(np.float32), read.astype(np.float32), left)
