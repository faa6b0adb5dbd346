"""Pieces that codecs are made of, on float32 arrays. They decode at once: what comes back is what a cache reads."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from ..reference.lattice_grids import POINTS, STEPS

Array = npt.NDArray[np.float32]


def f16(x: npt.ArrayLike) -> Array:
    """Rounded to f16, as scales are stored."""
    return np.asarray(x, np.float32).astype(np.float16).astype(np.float32)


def hadamard(x: npt.ArrayLike) -> Array:
    """H x along the last axis, in blocks of the largest power of two that divides it; H is its own inverse."""
    a = np.asarray(x, np.float32)
    n = a.shape[-1]
    block = n & -n
    h = np.ones((1, 1), np.float32)
    while len(h) < block:
        h = np.block([[h, h], [h, -h]])
    out: Array = (a.reshape(*a.shape[:-1], -1, block) @ (h / np.float32(np.sqrt(block)))).reshape(a.shape)
    return out


def affine(x: npt.ArrayLike, bits: int, axis: int, group: int = 0, eta: float = 0.0) -> Array:
    """zero + scale * code with both in f16, a pair for `group` values along `axis` (0: all of it). Codes of `bits` bits
    are the nearest ones between the least and the largest value; eta pulls these ends inward by a share of the range.
    Costs bits + 32 / group a value.
    """
    a = np.moveaxis(np.asarray(x, np.float32), axis, -1)
    g = a.reshape(*a.shape[:-1], -1, group or a.shape[-1])
    low, top = g.min(-1, keepdims=True), g.max(-1, keepdims=True)
    n, span = np.float32(2**bits - 1), top - low
    code = np.clip(np.floor((g - low) * (n / np.where(span > 0, span, 1)) + np.float32(0.5)), 0, n)
    back = f16(low + np.float32(eta) * span) + f16((1 - 2 * np.float32(eta)) * span / n) * code
    return np.moveaxis(back.reshape(a.shape), -1, axis)


@cache
def gaussian(bits: int) -> Array:
    """The 2^bits values of least mean square error for a unit Gaussian (Lloyd and Max), ascending."""
    x = np.linspace(-6, 6, 48001)
    p = np.exp(-x * x / 2)
    grid = np.linspace(-2, 2, 2**bits) if bits else np.zeros(1)
    for _ in range(2000):
        i = np.searchsorted((grid[1:] + grid[:-1]) / 2, x)
        new = np.bincount(i, p * x, len(grid)) / np.bincount(i, p, len(grid))
        if np.abs(new - grid).max() < 1e-9:
            break
        grid = new
    return grid.astype(np.float32)


def nearest(x: npt.ArrayLike, grid: Array) -> Array:
    """Each value as the nearest one of an ascending grid."""
    return grid[np.searchsorted((grid[1:] + grid[:-1]) / 2, np.asarray(x, np.float32))]


def rms(x: npt.ArrayLike) -> Array:
    """Root mean square along the last axis, f16, kept as an axis of one; never 0."""
    return f16(np.sqrt(np.square(np.asarray(x, np.float32)).mean(-1, keepdims=True)) + np.float32(1e-6))


def u8_scales(x: npt.ArrayLike) -> Array:
    """Scales [pages, cells, heads, 1] >= 0 in 8 bits: top * (u / 255)^2 with u rounded and top, the largest of a page
    and head, in f16. Never 0. Costs 8 + 16 / cells bits a scale.
    """
    a = np.asarray(x, np.float32)
    top = f16(a.max(1, keepdims=True)) + np.float32(1e-6)
    return top * np.square(np.maximum(np.floor(255 * np.sqrt(a / top) + np.float32(0.5)), 1) / 255).astype(np.float32)


@cache
def _squares(bits: int, side: int = 256) -> Array:
    """Points of the grid of (2, 2^(2 bits)) nearest to the centres of `side` squares a side from -4 to 4."""
    points = POINTS[2, 4**bits].astype(np.float32) * np.float32(STEPS[2, 4**bits] / 4096)
    at = (np.arange(side, dtype=np.float32) + 0.5) * (8 / side) - 4
    centre = np.stack(np.meshgrid(at, at, indexing="ij"), -1)
    return points[((centre[:, :, None] - points) ** 2).sum(-1).argmin(-1)]


def lattice(x: npt.ArrayLike, bits: int) -> Array:
    """Pairs of channels, about unit Gaussian, as the nearest point of the built-in grid of 1 to 4 bits a value."""
    a = np.asarray(x, np.float32)
    if not bits:
        return np.zeros_like(a)
    table = _squares(bits)
    i = np.clip((a + 4) * (len(table) / 8), 0, len(table) - 1).astype(np.int32).reshape(-1, 2)
    return table[i[:, 0], i[:, 1]].reshape(a.shape)


#: Parity polynomials (h0, h1) of Ungerboeck's codes for amplitude modulation, by the bits of memory (1987, table I).
_CODES = {2: (0o5, 0o2), 3: (0o13, 0o4), 4: (0o23, 0o4), 5: (0o45, 0o10), 6: (0o103, 0o24), 7: (0o235, 0o126),
          8: (0o515, 0o362)}  # fmt: skip


@cache
def _branches(memory: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Of the two branches into every state: the state that they come from, and their subset, [state, 2] each.

    Systematic feedback form: the lowest bit of a state leaves as z0 and is fed back by h0, the bit z1 that chooses the
    branch is fed in by h1. The subset is 2 z1 + z0.
    """
    h0, h1 = _CODES[memory]
    state, z1 = np.arange(1 << memory)[:, None], np.arange(2)
    z0 = state & 1
    to = (state >> 1) ^ (z0 * (h0 >> 1)) ^ (z1 * (h1 >> 1))
    order = np.argsort(to.reshape(-1), kind="stable").reshape(-1, 2)
    return order // 2, (2 * z1 + z0).reshape(-1)[order]


def trellis(x: npt.ArrayLike, bits: int, memory: int = 8) -> Array:
    """Trellis-coded quantisation along the last axis (Marcellin and Fischer 1990): `bits` bits a value, 2^memory
    states, the best path by Viterbi's algorithm. For values that are about unit Gaussian.

    Twice as many levels as `bits` can tell apart are dealt out to four subsets. A state allows two of them; one bit of
    a value chooses between these and moves the state, the others choose a level of the subset.
    """
    a = np.asarray(x, np.float32)
    rows = a.reshape(-1, a.shape[-1])
    subsets = gaussian(bits + 1).reshape(-1, 4)  # [levels, subset]: neighbours lie in other subsets
    back, into = _branches(memory)
    n, length = rows.shape
    cost = np.zeros((n, len(back)), np.float32)
    choice = np.empty((length, n, len(back)), np.uint8)
    near = np.empty((length, n, 4), np.float32)
    for t in range(length):
        far = (rows[:, t, None, None] - subsets) ** 2
        near[t] = np.take_along_axis(subsets[None], far.argmin(1)[:, None], 1)[:, 0]
        error = far.min(1)
        first, second = (cost[:, back[:, i]] + error[:, into[:, i]] for i in (0, 1))
        choice[t] = second < first
        cost = np.minimum(first, second)
    out, state, line = np.empty_like(rows), cost.argmin(-1), np.arange(n)
    for t in range(length - 1, -1, -1):
        chosen = choice[t, line, state]
        out[:, t] = near[t, line, into[state, chosen]]
        state = back[state, chosen]
    return out.reshape(a.shape)


def ridge(x: npt.ArrayLike, y: npt.ArrayLike, share: float = 1e-3) -> Array:
    """W of least |x W - y|^2 + penalty, x [n, inputs], y [n, outputs]; the penalty is a share of the inputs' energy."""
    a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
    c = a.T @ a
    c += share * np.trace(c) / len(c) * np.eye(len(c))
    return np.linalg.solve(c, a.T @ b).astype(np.float32)
