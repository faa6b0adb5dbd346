"""ZipCache (He et al. 2024, arXiv 2405.14256): salient cells in `hi` bits, the others in `lo`, keys and values with
one set per KV head.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from .codec import MIXED, Codec, K, V
from .method import LanePlan, LayerPlan, LayerShape, Method, register


@register
class ZipCache(Method):
    """A page is the interval; of its cells `salient` (section 4.2), rounded to a multiple of 32, take `hi` bits."""

    name = "zipcache"
    options: ClassVar[dict[str, Any]] = {
        "hi": 4,
        "lo": 2,
        "salient": 0.6,
        "interval": 160,
        "probe": 0.1,
        "normalise": True,
        "eta": 0.0,
        "keep": 1.0,
        "recent": 0.25,
        "window": 0,
        "sinks": 0,
        "scales": "u4",
        "precision": "int8",
        "state": "rows",
        "place": "device",
    }

    def plan(self, ordinal: int, n_layer: int, shape: LayerShape, prev: LayerShape | None) -> LayerPlan:
        o = self.o
        page = o["interval"]
        n_hi = 32 * int(np.floor(np.float32(o["salient"]) * np.float32(page) / np.float32(32) + np.float32(0.5)))

        def lane(role: int, d: int) -> LanePlan:
            group = page if role == K else d
            scale = {"f16": 0, "u8": 1, "u4": 1 if role == K else 2}[o["scales"]]
            return LanePlan(Codec(MIXED, role, o["lo"], group, scale, 0, o["eta"], page, d, o["hi"], n_hi))

        k, v, f32 = lane(K, shape.head_size_k), lane(V, shape.head_size_v), o["precision"] == "f32"
        kept = {"keep": o["keep"], "recent": o["recent"]} if o["keep"] < 1 else {}
        return LayerPlan(
            k, v, window=o["window"], sinks=o["sinks"], f32=f32, probe=o["probe"], normalise=o["normalise"], **kept
        )
