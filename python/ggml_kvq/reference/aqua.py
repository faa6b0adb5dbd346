"""AQUA-KV (Shutova et al. 2025, arXiv 2501.19392): lattice blocks of un-rotated keys and of values, less their
calibrated means and what the layer before says of them (predictor.py).
"""

from __future__ import annotations

from typing import Any, ClassVar

from .codec import V
from .higgs import LATTICE_OPTIONS, LatticeMethod
from .method import LanePlan, LayerPlan, LayerShape, register


@register
class Aqua(LatticeMethod):
    """The first layer takes first_bits at least (section 4); row = R_pos (decoded + prediction + mean)."""

    name = "aqua"
    options: ClassVar[dict[str, Any]] = {
        "predictor": "auto",
        "weights": "auto",
        "bits": 2,
        "k_bits": 0,
        "v_bits": 0,
        "first_bits": 4,
        "window": 128,
        **LATTICE_OPTIONS,
        "sinks": 4,
    }

    def bits(self, role: int, ordinal: int) -> int:
        own = self.o["v_bits" if role == V else "k_bits"] or self.o["bits"]
        return max(own, self.o["first_bits"]) if ordinal == 0 else own

    def plan(self, ordinal: int, n_layer: int, shape: LayerShape, prev: LayerShape | None) -> LayerPlan:
        plan = super().plan(ordinal, n_layer, shape, prev)
        # above two bits only d = 2 has grids
        k, v = (
            LanePlan(p.codec.with_(group=2) if p.codec.bits > 2 and p.codec.bits != self.own(p.codec.role) else p.codec)
            for p in (plan.k, plan.v)
        )
        predictor = self.o["predictor"]
        chain = {"k": "k", "full": "kv", "fold": "kk"}.get(predictor, "")
        bits = 4 if self.o["weights"] == "4" else 8
        return LayerPlan(
            k,
            v,
            window=plan.window,
            sinks=plan.sinks,
            f32=plan.f32,
            mean=predictor != "none",
            chain=chain,
            weights=bits,
        )

    def own(self, role: int) -> int:
        """Code bits of all layers but the first."""
        return self.o["v_bits" if role == V else "k_bits"] or self.o["bits"]
