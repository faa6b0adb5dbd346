"""Block formats: what a page of one KV head is, and the two operations every format defines.

A page is an f16 array [n_cells, head_size]. Its block is a pair of byte arrays (codes, params), uint8 [nb_codes] and
[nb_params], identical to what kvq_encode of ggml-kvq.h writes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

F16, AFFINE, LATTICE, MIXED = 0, 1, 2, 3  # kvq_type
K, V = 0, 1  # kvq_role
SPLIT_NORM, SPLIT_NEOX = 1, 2  # kvq_split
F16_MAX = np.float32(65504)


@dataclass(frozen=True)
class Codec:
    """The fields of kvq_codec, in its order.

    bits: 0..4 code bits (16 for f16). group: cells of a key group, channels of a value group or of a lattice index.
    scale: 0 f16 parameters, 1 8-bit, 2 4-bit ones. levels: 0 codes round to end points, 1 equal bins. eta: share of
    the range by which end points move inward. n_cells, head_size: shape of the page. hi, n_hi: of mixed pages, bits
    and number of the salient cells. split: of lattice keys, 0 one block, SPLIT_NORM or SPLIT_NEOX: a block for each
    half of the rotary pairs (lattice.py), fast_bits: code bits of the fast half. coords: a head's
    share of a cell's coordinates and their scale (basis.py).
    """

    type: int
    role: int
    bits: int
    group: int
    scale: int
    levels: int
    eta: float
    n_cells: int
    head_size: int
    hi: int = 0
    n_hi: int = 0
    split: int = 0
    fast_bits: int = 0
    coords: int = 0

    def with_(self, **fields: Any) -> Codec:
        return replace(self, **fields)


def to_f16(x: np.ndarray) -> np.ndarray:
    """f32 -> f16, nearest even, clamped to the finite range: an overflow becomes +-65504, nan stays nan."""
    return np.clip(x, -F16_MAX, F16_MAX).astype(np.float16)


def unpack_valid(valid: np.ndarray | None, n_cells: int) -> np.ndarray:
    """Bit i of little-endian uint8 [n_cells/8] -> bool [n_cells]; None: every cell holds data."""
    if valid is None:
        return np.ones(n_cells, bool)
    return np.unpackbits(valid, bitorder="little", count=n_cells).astype(bool)
