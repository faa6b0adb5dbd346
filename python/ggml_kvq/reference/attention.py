"""Attention in f64 over decoded keys and values: what kvq_attend approximates."""

from __future__ import annotations

import numpy as np


def alibi_slopes(n_head: int, max_bias: float) -> np.ndarray:
    """Slopes of the additive mask per query head, f64 [n_head] (ALiBi, arXiv 2108.12409, section 3); ones for max_bias
    0.

    With p the largest power of two up to n_head: 2^(-max_bias (h+1)/p) for h < p, then 2^(-max_bias/2 (2(h-p)+1)/p).
    """
    if max_bias <= 0:
        return np.ones(n_head)
    p = 1 << (n_head.bit_length() - 1)
    h = np.arange(n_head)
    return np.where(h < p, 2.0 ** (-max_bias * (h + 1) / p), 2.0 ** (-max_bias / 2 * (2 * (h - p) + 1) / p))


def logits(
    q: np.ndarray, k: np.ndarray, mask: np.ndarray, scale: float, max_bias: float = 0.0, softcap: float = 0.0
) -> np.ndarray:
    """q [n_q, n_head, dk], k [n_head_kv, n_slots, dk], mask [n_q, 1 or n_head, n_slots] -> f64 [n_q, n_head, n_slots].

    scale * q.k, soft-capped to softcap * tanh(x / softcap), plus slope * mask. -inf masks a slot whatever its key
    holds.
    """
    n_head, n_head_kv = q.shape[1], k.shape[0]
    k = np.repeat(np.asarray(k, np.float64), n_head // n_head_kv, axis=0)
    x = np.einsum("ihd,htd->iht", q.astype(np.float64), k) * scale
    if softcap:
        x = softcap * np.tanh(x / softcap)
    bias = alibi_slopes(n_head, max_bias)[None, :, None] * np.asarray(mask, np.float64)
    return np.where(np.isneginf(bias), -np.inf, x + bias)


def weights(x: np.ndarray, sinks: np.ndarray | None = None) -> np.ndarray:
    """Softmax over slots, f64; sinks [n_head]: one more logit per head that takes weight and gives no value.

    A row without any slot has weights 0.
    """
    top = x.max(axis=-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, np.asarray(sinks, np.float64)[None, :, None])
    top = np.where(np.isneginf(top), 0.0, top)
    e = np.exp(x - top)
    total = e.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(np.asarray(sinks, np.float64)[None, :, None] - top)
    return np.divide(e, total, out=np.zeros_like(e), where=total > 0)


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray,
    scale: float,
    max_bias: float = 0.0,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """-> f64 [n_q, n_head, dv]. v [n_head_kv, n_slots, dv]; the other arguments as in logits() and weights()."""
    w = weights(logits(q, k, mask, scale, max_bias, softcap), sinks)
    return np.einsum("iht,htd->ihd", w, np.repeat(np.asarray(v, np.float64), q.shape[1] // k.shape[0], axis=0))
