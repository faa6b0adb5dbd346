"""Which cells are salient (ZipCache, arXiv 2405.14256, section 4): probe rows, column sums of attention, the choice
of a page's set.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_MASK = 0xFFFFFFFF


def _hash(row: int, seed: int) -> int:
    x = (row * 0x9E3779B1 + (row >> 32) + seed * 0x85EBCA77) & _MASK
    x = (x ^ x >> 16) * 0x7FEB352D & _MASK
    x = (x ^ x >> 15) * 0x846CA68B & _MASK
    return x ^ x >> 16


def probe_rows(n: int, at: int, share: float, page_cells: int, seed: int) -> list[int]:
    """Rows of a call of n query tokens that score cells, ascending (section 4.3: half the latest, half random).

    at: cell of the first token; seed: ordinal of the layer. From 32 tokens on: the last ceil(share/2 * n), and as many
    of the others, those of the smallest hash of (cell, seed). Below: tokens whose cell modulo the page is within its
    last share/2, and tokens whose hash of (cell, 0) is below share/2 of all: the same in every layer.
    """
    half = float(np.float32(share)) / 2
    of = half * (1 - 1e-6)  # a share in f32 may be a little too large
    if n < 32:
        tail = page_cells - math.ceil(of * page_cells)
        return [i for i in range(n) if (at + i) % page_cells >= tail or _hash(at + i, 0) < half * 2.0**32]
    n_half = math.ceil(of * n)
    n_rest = max(n - n_half, 0)
    rest = sorted(range(n_rest), key=lambda i: (_hash(at + i, seed), i))
    return sorted(rest[:n_half]) + list(range(n_rest, n))


def column_sums(weights: np.ndarray, n_head_kv: int, rows: Any = None) -> np.ndarray:
    """weights f64 [n_q, n_head, n_slots] (attention.weights) -> f64 [n_head_kv, n_slots]: summed over rows and the
    heads of a group.
    """
    w = weights if rows is None else weights[rows]
    n_q, n_head, n_slots = w.shape
    return np.asarray(w.reshape(n_q, n_head_kv, n_head // n_head_kv, n_slots).sum(axis=(0, 2)))


def choose(sums: np.ndarray, seen: np.ndarray | None, n_hi: int) -> np.ndarray:
    """sums [n_cells] of one KV head, seen [n_cells] rows that could see a cell (None: scores stay accumulated) -> bool
    [n_cells].

    The n_hi cells of the largest score, the earlier one of equals (equation 8).
    """
    score = sums if seen is None else sums / np.maximum(seen, 1)
    out = np.zeros(score.size, bool)
    out[np.argsort(-score, kind="stable")[:n_hi]] = True
    return out
