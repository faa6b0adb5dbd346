"""Predictor matrices (AQUA-KV, arXiv 2501.19392, section 3.1): y = W x over rows rounded to 8 bits. The definition of
every bit.

In f32 and in this order: amax = max |x| (below 1e-30: 0), x8 = round(x * (127/amax)) to nearest even, s = amax/127,
8 bits: y = (step * f32(integer sum of code * x8)) * s; 4 bits: y = (sum over groups of 32 inputs, in order, of step *
f32(integer sum of code * x8)) * s.

bits 8: step = largest magnitude of the output's weights / 63, f32, codes -63..63. bits 4: step = f16(largest value of
the group by magnitude / -8), codes -8..7 (ggml's q4_0). code = round(w * (1/step)), 0 for step 0.

Bytes: per tile of 16 outputs and group, chunks of 64 bytes [output][k] of codes plus 64 (8 bits: input 4c + k) or plus
8 (4 bits: low half input 8c + k, high half 8c + 4 + k); then all steps, f32 [output] or f16 [tile][group][16].

Along the layers of a cache (section 3.1), rows less their means: k[l] = Wk k[l-1] + decoded, and v[l] = Wvk k[l] + Wvv
v[l-1] + decoded ("full") or Wvk k[l] + Wvp k[l-1] + decoded ("fold").
"""

from __future__ import annotations

import numpy as np

GROUP = 32
F32 = np.float32


def quantise_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f32 [n, width] -> (x8 int8 [n, width], s f32 [n])."""
    x = x.astype(F32)
    amax = np.abs(x).max(-1, keepdims=True)
    live = amax >= F32(1e-30)
    with np.errstate(divide="ignore"):
        inv = np.where(live, F32(127) / amax, F32(0))
    return np.rint(x * inv).astype(np.int8), np.where(live, amax / F32(127), F32(0))[:, 0]


def codes(w: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """w f32 [n_out, n_in] -> (codes int8 [n_out, groups, 32], steps f16 [n_out, groups] or, of 8 bits, f32 [n_out, 1]);
    inputs are padded with zeros.
    """
    n_out, n_in = w.shape
    x = np.zeros((n_out, -(-n_in // GROUP) * GROUP), F32)
    x[:, :n_in] = w
    x = x.reshape(n_out, 1 if bits == 8 else -1, x.shape[1] if bits == 8 else GROUP)
    top = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)[..., 0]
    step = np.abs(top) / F32(63) if bits == 8 else (top / F32(-8) + F32(0)).astype(np.float16)  # + 0: no negative zero
    d = step.astype(F32)
    with np.errstate(divide="ignore"):
        inv = np.where(d != 0, F32(1) / d, F32(0))
    low, high = (-63, 63) if bits == 8 else (-8, 7)
    return np.clip(np.rint(x * inv[..., None]), low, high).astype(np.int8).reshape(n_out, -1, GROUP), step


def pack(w: np.ndarray, bits: int) -> np.ndarray:
    """w f32 [n_out, n_in] -> uint8 bytes."""
    c, step = codes(w, bits)
    tiles = -(-c.shape[0] // 16)
    full = np.zeros((tiles * 16, *c.shape[1:]), np.int64)
    full[: c.shape[0]] = c
    steps = np.zeros((tiles * 16, step.shape[1]), step.dtype)
    steps[: c.shape[0]] = step
    if bits == 8:
        out = (full + 64).reshape(tiles, 16, -1, 8, 4).transpose(0, 2, 3, 1, 4)
    else:
        x = (full + 8).reshape(tiles, 16, -1, 4, 2, 4).transpose(0, 2, 3, 1, 5, 4)
        out = x[..., 0] | x[..., 1] << 4
    tail = steps.reshape(tiles, 16, -1).transpose(0, 2, 1).astype("<f4" if bits == 8 else "<f2")
    return np.concatenate([out.astype(np.uint8).reshape(-1), np.ascontiguousarray(tail).view(np.uint8).reshape(-1)])


def predict(w: np.ndarray, bits: int, rows: np.ndarray, add: np.ndarray | None = None) -> np.ndarray:
    """rows f32 [n, n_in] -> f32 [n, n_out], to the bit what kvq_predict gives."""
    c, step = codes(w, bits)
    x8, s = quantise_rows(rows)
    padded = np.zeros((len(rows), c.shape[1] * GROUP), np.int64)
    padded[:, : rows.shape[1]] = x8
    total = np.zeros((len(rows), c.shape[0]), F32)
    c = c.reshape(len(c), step.shape[1], -1).astype(np.int64)  # inputs of a step
    for g in range(c.shape[1]):
        dot = padded[:, g * c.shape[2] : (g + 1) * c.shape[2]] @ c[:, g].T
        total = total + step[:, g].astype(F32) * dot.astype(F32)
    y = total * s[:, None]
    return y if add is None else add.astype(F32) + y
