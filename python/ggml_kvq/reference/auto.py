"""One number instead of a method: lattice blocks (HIGGS), less their means where there is data (AQUA-KV, bias only),
with bits that differ by layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from .codec import V
from .higgs import LATTICE_OPTIONS, LatticeMethod
from .method import LayerPlan, LayerShape, register

#: Code bits of keys and values, the rungs that a layer climbs: pairs that have kernels.
RUNGS = ((1, 1), (2, 1), (2, 2), (3, 2), (3, 3), (4, 4))


def spread(n: int) -> list[int]:
    """Layers 0..n-1, first 0, then the middle, then the quarters: a counter with its bits reversed."""
    width = max((n - 1).bit_length(), 0)
    reverse = [int(f"{i:0{width}b}"[::-1], 2) if width else 0 for i in range(1 << width)]
    return [at for at in reverse if at < n]


def order_of(text: str, n_layer: int) -> list[int]:
    """Layers in the order in which they rise, each as often as there are rungs above the first. ValueError when the
    text is none."""
    if text == "none":
        upper, lower = ([i for i in spread(n_layer) if (2 * i >= n_layer) == side] for side in (True, False))
        between = [half for _ in range(len(RUNGS) - 2) for half in (upper, lower)]
        return [i for half in (upper, *between, lower) for i in half]
    out = [int(word) for word in text.split(".")]
    if sorted(out) != sorted(list(range(n_layer)) * (len(RUNGS) - 1)):
        raise ValueError(f"order={text} does not name each of {n_layer} layers {len(RUNGS) - 1} times")
    return out


@register
class Auto(LatticeMethod):
    """A layer stands on as many rungs as it occurs among the first `level` entries of `order`. level=-1 is the highest
    level whose allocated bytes are within `bits`, which cache/level.cpp finds: layouts are the library's alone."""

    name = "auto"
    options: ClassVar[dict[str, Any]] = {
        "bits": 0.0,
        "at": 0,
        "level": -1,
        "order": "none",
        "means": "auto",
        "window": 64,
        **{key: value for key, value in LATTICE_OPTIONS.items() if key != "grid"},
        "sinks": 4,
        "far": "none",
        "top": 64,
        "prompt": "exact",
    }

    def plan(self, ordinal: int, n_layer: int, shape: LayerShape, prev: LayerShape | None) -> LayerPlan:
        risen = order_of(self.o["order"], n_layer)[: max(self.o["level"], 0)]
        self.rung = RUNGS[risen.count(ordinal)]
        self.o["grid"] = "d2"
        plan = super().plan(ordinal, n_layer, shape, prev)
        del self.o["grid"]
        plan = replace(plan, mean=self.o["means"] == "on")
        if self.o["far"] == "none":
            return plan
        return replace(
            plan, top=self.o["top"], far=self.o["far"], fetch="now", exact=self.o["prompt"] == "exact"
        )  # as specache

    def bits(self, role: int, ordinal: int) -> int:
        return self.rung[role == V]
