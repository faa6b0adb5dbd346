"""KIVI (Liu et al. 2024, arXiv 2402.02750): keys per channel over groups of cells, values per token over groups of
channels.
"""

from __future__ import annotations

from typing import Any, ClassVar

from .codec import AFFINE, Codec, K, V
from .method import AFFINE_OPTIONS, LanePlan, LayerPlan, LayerShape, Method, register


class AffineMethod(Method):
    """Keys and values in affine blocks; subclasses say bits, levels, eta and sharing of a lane."""

    def lane(self, role: int, ordinal: int, n_layer: int, shape: LayerShape, prev: LayerShape | None) -> dict[str, Any]:
        """Codec fields bits, eta, levels, and shares_codes."""
        raise NotImplementedError

    def plan(self, ordinal: int, n_layer: int, shape: LayerShape, prev: LayerShape | None) -> LayerPlan:
        o = self.o
        lanes: list[LanePlan] = []
        for role, head_size in ((K, shape.head_size_k), (V, shape.head_size_v)):
            fields = self.lane(role, ordinal, n_layer, shape, prev)
            shares = fields.pop("shares_codes", False)
            group = o["group"] if role == K else o["group_v"] or min(o["group"], head_size)
            codec = Codec(
                AFFINE,
                role,
                group=group,
                scale=int(o["scales"] == "u8"),
                n_cells=max(32, o["group"]),  # keys need whole groups in a page
                head_size=head_size,
                **{"levels": 0, **fields},
            )
            lanes.append(LanePlan(codec, shares))
        return LayerPlan(lanes[0], lanes[1], window=o["window"], sinks=o["sinks"], f32=o["precision"] == "f32")


@register
class Kivi(AffineMethod):
    """z = min, s = (max - min) / (2^bits - 1), code = round((x - z) / s) (section 3). levels=mid: equal bins and
    mid-points.
    """

    name = "kivi"
    options: ClassVar[dict[str, Any]] = {
        "bits": 2,
        "k_bits": 0,
        "v_bits": 0,
        "levels": "ends",
        "eta": 0.0,
        **AFFINE_OPTIONS,
    }

    def lane(self, role: int, ordinal: int, n_layer: int, shape: LayerShape, prev: LayerShape | None) -> dict[str, Any]:
        bits = self.o["v_bits" if role == V else "k_bits"] or self.o["bits"]
        mid = self.o["levels"] == "mid"
        # mid-points of 2^bits equal bins are end points pulled in by half a bin
        return {"bits": bits, "levels": int(mid), "eta": 0.5 / (1 << bits) if mid else self.o["eta"]}
