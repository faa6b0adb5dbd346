"""The f16 image of a block that a saved state carries.

Decoded values whose lowest w mantissa bits hold the parameter bytes, as one little-endian bit stream in row order:

    w = ceil(8 * nb_params / (n_cells * head_size)),   1 for groups of 32 with f16 parameters

Bits behind the stream are zero. A reader takes the parameters from the low bits and looks for codes that give the rest.
"""

from __future__ import annotations

import numpy as np

from .codec import Codec
from .types import TYPES


def width(c: Codec) -> int:
    """Low mantissa bits that carry parameters."""
    return -(-8 * TYPES[c.type].nbytes(c)[1] // (c.n_cells * c.head_size))


def write(c: Codec, codes: np.ndarray, params: np.ndarray) -> np.ndarray:
    """(codes, params) -> uint16 [n_cells, head_size], f16 bits."""
    rows, w = TYPES[c.type].decode(c, codes, params).view(np.uint16), width(c)
    bits = np.zeros(rows.size * w, np.uint16)
    stream = np.unpackbits(params, bitorder="little")
    bits[: stream.size] = stream
    low = (bits.reshape(rows.size, w) << np.arange(w, dtype=np.uint16)).sum(axis=1, dtype=np.uint16)
    return (rows & np.uint16(0xFFFF ^ ((1 << w) - 1))) | low.reshape(rows.shape)


def read(c: Codec, image: np.ndarray, shared: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray] | None:
    """uint16 [n_cells, head_size] -> (codes, params), or None for rows that are no image."""
    w, nb = width(c), TYPES[c.type].nbytes(c)[1]
    bits = (image.reshape(-1, 1) >> np.arange(w, dtype=np.uint16) & 1).astype(np.uint8).reshape(-1)
    if bits[8 * nb :].any():
        return None
    params = np.packbits(bits[: 8 * nb], bitorder="little")
    codes = TYPES[c.type].match(c, image.view(np.float16), (1 << w) - 1, params, shared)
    return None if codes is None else (codes, params)
