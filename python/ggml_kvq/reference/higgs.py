"""HIGGS (Malinovskii et al. 2024, arXiv 2411.17525) on the KV cache: Hadamard rotation per head, one scale a cell,
grid indices.
"""

from __future__ import annotations

from typing import Any, ClassVar

from .codec import LATTICE, Codec, K, V
from .method import LanePlan, LayerPlan, LayerShape, Method, register

#: Options of the methods that keep lattice blocks, as KVQ_OPTIONS_LATTICE in methods/method.h.
LATTICE_OPTIONS: dict[str, Any] = {
    "grid": "auto",
    "sinks": 0,
    "scales": "u8",
    "precision": "int8",
    "state": "rows",
    "place": "device",
}
VECTOR = {"auto": 2, "d2": 2, "d4": 4, "d8": 8}


class LatticeMethod(Method):
    """Keys and values in lattice blocks."""

    def bits(self, role: int, ordinal: int) -> int:
        """Code bits of a lane."""
        return int(self.o["v_bits" if role == V else "k_bits"] or self.o["bits"])

    def plan(self, ordinal: int, n_layer: int, shape: LayerShape, prev: LayerShape | None) -> LayerPlan:
        o = self.o
        k, v = (
            LanePlan(
                Codec(
                    LATTICE,
                    role,
                    self.bits(role, ordinal),
                    VECTOR[o["grid"]],
                    {"f16": 0, "u8": 1, "u4": 2}[o["scales"]],
                    0,
                    0.0,
                    32,
                    head_size,
                )
            )
            for role, head_size in ((K, shape.head_size_k), (V, shape.head_size_v))
        )
        return LayerPlan(k, v, window=o["window"], sinks=o["sinks"], f32=o["precision"] == "f32")


@register
class Higgs(LatticeMethod):
    """Cells are independent: no calibration and no groups (AQUA-KV section 3.2)."""

    name = "higgs"
    options: ClassVar[dict[str, Any]] = {"bits": 2, "k_bits": 0, "v_bits": 0, "window": 64, **LATTICE_OPTIONS}
