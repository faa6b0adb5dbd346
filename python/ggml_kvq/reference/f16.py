"""f16 blocks (rows as they came) and the method f16, the control arm.

codes: f16 [n_cells][head_size], little-endian; params: none.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from .codec import F16, Codec, K, V
from .method import LanePlan, LayerPlan, LayerShape, Method, register


def nbytes(c: Codec) -> tuple[int, int]:
    """(nb_codes, nb_params) = (2 * n_cells * head_size, 0)."""
    return 2 * c.n_cells * c.head_size, 0


def encode(
    c: Codec, rows: np.ndarray, valid: np.ndarray | None = None, shared: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """rows f16 [n_cells, head_size] -> (codes uint8, params uint8 [0])."""
    return rows.astype("<f2").reshape(-1).view(np.uint8).copy(), np.zeros(0, np.uint8)


def decode(c: Codec, codes: np.ndarray, params: np.ndarray) -> np.ndarray:
    """-> f16 [n_cells, head_size]."""
    return codes.view("<f2").reshape(c.n_cells, c.head_size).astype(np.float16)


def exact(c: Codec, codes: np.ndarray, params: np.ndarray) -> np.ndarray:
    """-> f64 [n_cells, head_size]."""
    return decode(c, codes, params).astype(np.float64)


def match(c: Codec, rows: np.ndarray, mask: int, params: np.ndarray, shared: np.ndarray | None) -> np.ndarray:
    """Every row is its own image."""
    return encode(c, rows)[0]


@register
class F16Method(Method):
    """Every cell in f16, open for good: equals upstream's cache."""

    name = "f16"
    options: ClassVar[dict[str, Any]] = {}

    def plan(self, ordinal: int, n_layer: int, shape: LayerShape, prev: LayerShape | None) -> LayerPlan:
        def lane(role: int, head_size: int) -> LanePlan:
            return LanePlan(Codec(F16, role, 16, 32, 0, 0, 0.0, 32, head_size))

        return LayerPlan(lane(K, shape.head_size_k), lane(V, shape.head_size_v), window=0)
