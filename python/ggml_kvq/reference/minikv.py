"""MiniKV (Sharma et al. 2024, arXiv 2411.18077): heavy hitters and newest cells of a prompt in 2-bit groups of 16,
the rest evicted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from .kivi import AffineMethod
from .method import LayerPlan, LayerShape, register


def pyramid(hh: float, depth: int, ordinal: int, n_layer: int) -> float:
    """Heavy hitters of a layer: 2 hh - hh/depth in the first, hh/depth in the last, linear between; the mean is hh
    (section 3.1.3).
    """
    at = ordinal / (n_layer - 1) if n_layer > 1 else 0.5
    return hh * ((2 - 1 / depth) + (2 / depth - 2) * at)


@register
class MiniKV(AffineMethod):
    """keep = hh + rw of a prompt (section 4.1), chosen per KV head by summed attention (section 3.1.1); keys and
    values as kivi.
    """

    name = "minikv"
    options: ClassVar[dict[str, Any]] = {
        "hh": 0.25,
        "rw": 0.25,
        "budget": "uniform",
        "depth": 7,
        "bits": 2,
        "eta": 0.0,
        "group": 16,
        "group_v": 0,
        "window": 128,
        "sinks": 0,
        "scales": "u8",
        "precision": "int8",
        "place": "device",
    }

    def lane(self, role: int, ordinal: int, n_layer: int, shape: LayerShape, prev: LayerShape | None) -> dict[str, Any]:
        return {"bits": self.o["bits"], "eta": self.o["eta"]}

    def plan(self, ordinal: int, n_layer: int, shape: LayerShape, prev: LayerShape | None) -> LayerPlan:
        o = self.o
        hh = pyramid(o["hh"], o["depth"], ordinal, n_layer) if o["budget"] == "pyramid" else o["hh"]
        plan = super().plan(ordinal, n_layer, shape, prev)
        return replace(plan, keep=min(hh + o["rw"], 1.0), recent=o["rw"], probe=1.0, normalise=False)
