"""Predictor matrices as GGUF holds them: f16, or ggml's q4_0 with the rounding of each column made good by the
columns behind it (GPTQ, arXiv 2210.17323, section 3).
"""

from __future__ import annotations

import numpy as np

GROUP = 32  # weights of a q4_0 block: f16 scale, then 16 bytes, low halves first


def to_f16(w: np.ndarray) -> np.ndarray:
    """w [n_out, n_in] -> f16 of the same shape."""
    return np.clip(w, -65504, 65504).astype(np.float16)


def q4_0_scale(x: np.ndarray) -> np.ndarray:
    """x [n_out, 32] -> f16 [n_out]: the value of largest magnitude / -8."""
    top = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1)[:, 0]
    return np.asarray(top / -8 + 0.0, np.float16)


def to_q4_0(w: np.ndarray, xx: np.ndarray | None = None) -> np.ndarray:
    """w [n_out, n_in] -> blocks uint8 [n_out, n_in/32*18]; xx: sum of x x^T of the inputs, None: plain rounding.

    n_in a multiple of 32.
    """
    w = np.array(w, np.float64)
    n_out, n_in = w.shape
    carry = None
    if xx is not None:
        damp = 1e-2 * np.trace(xx) / n_in
        carry = np.linalg.cholesky(np.linalg.inv(xx + max(damp, 1e-12) * np.eye(n_in))).T  # upper
    out = np.zeros((n_out, n_in // GROUP, 18), np.uint8)
    for g in range(n_in // GROUP):
        first = g * GROUP
        scale = q4_0_scale(w[:, first : first + GROUP])
        d = scale.astype(np.float64)
        inv = np.divide(1, d, out=np.zeros_like(d), where=d != 0)
        code = np.zeros((n_out, GROUP), np.uint8)
        for j in range(first, first + GROUP):
            q = np.clip(np.rint(w[:, j] * inv), -8, 7)
            code[:, j - first] = q + 8
            if carry is not None and j + 1 < n_in:
                w[:, j + 1 :] -= np.outer((w[:, j] - q * d) / carry[j, j], carry[j, j + 1 :])
        out[:, g, :2] = scale.astype("<f2")[:, None].view(np.uint8)
        out[:, g, 2:] = code[:, :16] | code[:, 16:] << 4
    return out.reshape(n_out, -1)


def to_f32(raw: np.ndarray, form: str) -> np.ndarray:
    """Values of what to_f16 or to_q4_0 gave, f32 [n_out, n_in]."""
    if form == "f16":
        return raw.astype(np.float32)
    blocks = raw.reshape(len(raw), -1, 18)
    d = np.ascontiguousarray(blocks[..., :2]).view("<f2").astype(np.float32)
    code = np.concatenate([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], -1).astype(np.float32)
    return (d * (code - 8)).reshape(len(raw), -1)
