"""The laboratory: rows as they came, until a class of ggml_kvq.lab makes something else of them."""

from __future__ import annotations

from typing import Any, ClassVar

from .codec import F16, Codec, K, V
from .method import LanePlan, LayerPlan, LayerShape, Method, register


@register
class Lab(Method):
    """Pages seal as those of other methods do, and a sealed block is an f16 block."""

    name = "lab"
    options: ClassVar[dict[str, Any]] = {"window": 128, "sinks": 0, "page": 32}

    def plan(self, ordinal: int, n_layer: int, shape: LayerShape, prev: LayerShape | None) -> LayerPlan:
        def lane(role: int, head_size: int) -> LanePlan:
            return LanePlan(Codec(F16, role, 16, self.o["page"], 0, 0, 0.0, self.o["page"], head_size))

        k, v = lane(K, shape.head_size_k), lane(V, shape.head_size_v)
        return LayerPlan(k, v, window=self.o["window"], sinks=self.o["sinks"])
