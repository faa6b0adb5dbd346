"""Coordinates of cells in a calibrated basis, the definition (types/basis.h has the formulas).

Rows are f32 [cells, width], of all heads, less their means: keys before rotary embedding, which have coordinates, and
values, which are read from those.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

TOP, STEP = 15, np.float32(0.3375)
ERROR = 0.0116  # mean square error of a coordinate of variance 1: 16 steps of 0.3375


def scale_of(code: U8) -> F32:
    """(8 + code % 8) 2^(code / 8 - 19)"""
    return np.ldexp((8 + (code & 7)).astype(np.float32), (code >> 3).astype(np.int32) - 19)


def tables(axes: F32) -> tuple[npt.NDArray[np.int8], F32]:
    """(out [n, width], step [width]) of axes [n, width]."""
    step = np.abs(axes).max(0) / np.float32(2) / np.float32(127)
    safe = np.where(step > 0, step, np.float32(1))
    return np.where(step > 0, np.rint(axes / np.float32(2) / safe), 0).astype(np.int8), step


def encode(rows: F32, read: F32) -> tuple[U8, U8]:
    """(c [cells, n], code of the scale [cells]); read: f32 [n, width]."""
    z = np.zeros((len(rows), len(read)), np.float32)
    for i in range(rows.shape[1]):  # in this order
        z += rows[:, i : i + 1] * read[:, i]
    total = np.zeros(len(rows), np.float32)
    for j in range(z.shape[1]):
        total += z[:, j] * z[:, j]
    want = STEP * np.sqrt(total / np.float32(z.shape[1]))
    m, x = np.frexp(want)
    code = (x - 4 + 19) * 8 + np.floor(m * np.float32(16) - np.float32(8) + np.float32(0.5)).astype(np.int32)
    scale = np.where(want > 0, np.clip(code, 0, 255), 0).astype(np.uint8)
    c = np.clip(np.floor(z / scale_of(scale)[:, None]) + 8, 0, TOP)
    return c.astype(np.uint8), scale


def decode(c: U8, scale: U8, axes: F32) -> F32:
    """Rows that coordinates say."""
    out, step = tables(axes)
    sums = (2 * c.astype(np.int64) - TOP) @ out.astype(np.int64)
    return step * sums.astype(np.float32) * scale_of(scale)[:, None]


def pack(c: U8, scale: U8, heads: int) -> list[bytes]:
    """Of each head, behind the scales of its block: u8 [coords/2][cells]."""
    pairs = np.concatenate([(c[:, 0::2] | c[:, 1::2] << 4).T, scale[None]]).astype(np.uint8)
    return [part.tobytes() for part in np.split(pairs, heads)]
