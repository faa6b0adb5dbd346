"""Measures of one cache against the f16 cache on the same tokens, defined as llama-perplexity defines them.

The base's log-probabilities are kept as 16-bit steps per row: lp[i] = min + scale * u16[i], floor 16 nats under the
top.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .. import cpus

T = TypeVar("T")
F32 = npt.NDArray[np.float32]
U16 = npt.NDArray[np.uint16]

#: Tokens less likely than this under the base (natural log) do not enter the divergence.
FLOOR = -16.0
BLOCK = 16  # rows that a thread takes at once


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    """numpy lets other threads run while it works on rows. Those of one model have millions of values a call."""
    return ThreadPoolExecutor(cpus.available())


def in_blocks(n: int, work: Callable[[slice], T]) -> list[T]:
    """work(rows) of each block of n rows, side by side, in their order. A row's result depends on that row alone."""
    return list(_threads().map(work, (slice(i, i + BLOCK) for i in range(0, n, BLOCK))))


def log_softmax(logits: F32) -> F32:
    """Row-wise log-softmax, float32 [n, n_vocab]; sums in float64."""
    top = logits.max(axis=1, keepdims=True)
    shifted = logits - top
    total = np.exp(shifted).sum(axis=1, dtype=np.float64, keepdims=True)
    out: F32 = shifted - np.log(total).astype(np.float32)
    return out


def pack(logits: F32) -> npt.NDArray[np.uint16]:
    """Rows as llama-perplexity stores them: uint16 [n, 4 + n_vocab padded to even]; the first four hold scale and
    minimum.
    """
    if not len(logits):
        return np.zeros((0, row_words(logits.shape[1])), np.uint16)
    return np.concatenate(in_blocks(len(logits), lambda rows: _pack(logits[rows])))


def _pack(logits: F32) -> U16:
    n, n_vocab = logits.shape
    top = logits.max(axis=1)
    low = np.maximum(logits.min(axis=1), top + FLOOR)
    total = np.log(np.exp(logits - top[:, None]).sum(axis=1, dtype=np.float64)).astype(np.float32)
    scale = ((top - low) / np.float32(65535)).astype(np.float32)
    out = np.zeros((n, row_words(n_vocab)), np.uint16)
    out[:, :4] = np.stack([scale, low - top - total], axis=1).astype(np.float32).view(np.uint16)
    step = np.where(scale > 0, scale, 1)[:, None]
    out[:, 4 : 4 + n_vocab] = np.rint(np.maximum(logits - low[:, None], 0) / step).astype(np.uint16)
    return out


def unpack(rows: U16, n_vocab: int) -> F32:
    """Log-probabilities float32 [n, n_vocab] of packed rows."""
    head = np.ascontiguousarray(rows[:, :4]).view(np.float32)
    return rows[:, 4 : 4 + n_vocab].astype(np.float32) * head[:, :1] + head[:, 1:2]


def row_words(n_vocab: int) -> int:
    """uint16 words of one packed row."""
    return 2 * ((n_vocab + 1) // 2) + 4


def _mean_error(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    n = len(values)
    mean = float(values.mean()) if n else 0.0
    var = float((values**2).mean() - mean**2) if n else 0.0
    return mean, math.sqrt(var / (n - 1)) if n > 10 and var > 0 else 0.0


def _compare(logits: F32, base: U16, targets: npt.NDArray[np.int32]) -> tuple[npt.NDArray[Any], ...]:
    """Divergence's four lists for some rows."""
    lp, ref = log_softmax(logits), unpack(base, logits.shape[1])
    rows = np.arange(len(lp))
    weight = np.where(ref > FLOOR, np.exp(ref), 0)
    return (
        -lp[rows, targets].astype(np.float64),
        -ref[rows, targets].astype(np.float64),
        (weight * (ref - lp)).sum(axis=1, dtype=np.float64),
        lp.argmax(axis=1) == ref.argmax(axis=1),
    )


@dataclass
class Divergence:
    """Per-token sums of one run: negative log-likelihood (nats), the base's, KL(base || cache) (nats), top-1
    agreement.
    """

    nll: list[npt.NDArray[np.float64]] = field(default_factory=list)
    nll_base: list[npt.NDArray[np.float64]] = field(default_factory=list)
    kld: list[npt.NDArray[np.float64]] = field(default_factory=list)
    same_top: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # of windows, in tokens: two caches are compared window by window

    def add(self, logits: F32, base: U16, targets: npt.NDArray[np.int32]) -> None:
        """logits [n, n_vocab] of the cache under test, base: packed rows of the f16 cache, targets: next tokens [n]."""
        for part in in_blocks(len(logits), lambda rows: _compare(logits[rows], base[rows], targets[rows])):
            for values, more in zip((self.nll, self.nll_base, self.kld, self.same_top), part, strict=True):
                values.append(more)  # type: ignore[attr-defined]

    def values(self) -> npt.NDArray[np.float64]:
        """KL divergence of every scored token, nats."""
        return np.concatenate(self.kld)

    def summary(self) -> dict[str, Any]:
        """ppl, ppl_base, ln_ppl_ratio, kld_mean/median/p99/max (nats), kld_by_window, same_top (fraction), *_err
        (standard errors), n_tokens.
        """
        nll, base = np.concatenate(self.nll), np.concatenate(self.nll_base)
        kld, same = self.values(), np.concatenate(self.same_top)
        mean, err = _mean_error(nll)
        mean_base, err_base = _mean_error(base)
        n = len(nll)
        cov = float((nll * base).mean() - nll.mean() * base.mean()) / (n - 1) if n >= 10 else 0.0
        top = float(same.mean())
        kld_mean, kld_err = _mean_error(kld)
        return {
            "n_tokens": n,
            "ppl": math.exp(mean),
            "ppl_err": math.exp(mean) * err,
            "ppl_base": math.exp(mean_base),
            "ln_ppl_ratio": mean - mean_base,
            "ln_ppl_ratio_err": math.sqrt(max(0.0, err**2 + err_base**2 - 2 * cov)),
            "kld_mean": kld_mean,
            "kld_err": kld_err,
            "kld_median": float(np.median(kld)),
            "kld_p99": float(np.quantile(kld, 0.99)),
            "kld_max": float(kld.max()),
            "kld_by_window": [round(float(x.mean()), 6) for x in np.split(kld, self.ends) if len(x)],
            "same_top": top,
            "same_top_err": math.sqrt(top * (1 - top) / max(1, n - 1)),
        }
