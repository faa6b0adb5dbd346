"""One number instead of a method: lattice blocks (HIGGS), less their means where there is data (AQUA-KV, bias only),
with bits that differ by layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from .codec import SPLIT_NEOX, SPLIT_NORM, V
from .higgs import LATTICE_OPTIONS, LatticeMethod
from .method import LayerPlan, LayerShape, register

#: Code bits of the fast and of the slow half of the keys' rotary pairs, and of values: the rungs that a layer climbs.
RUNGS = ((0, 2, 1), (0, 2, 2), (0, 4, 2), (0, 4, 3), (2, 4, 3), (2, 4, 4), (4, 4, 4))
#: and where keys are one block
WHOLE = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (3, 3, 2), (3, 3, 3), (4, 4, 4))
Rung = tuple[int, int, int]
#: Sorted keys: bits of the weak and of the strong half, and those of values, which rise apart from each other. Keys
#: stand on the last rung only where values do.
SORTED_KEYS = ((1, 2), (1, 3), (1, 4), (2, 4), (4, 4))
SORTED_VALUES = (1, 2, 3, 4)
#: Keys that have coordinates (basis.py)
COORD_KEYS = ((0, 1), (1, 1), *SORTED_KEYS)
#: Sides of all layers that rise one behind the other, without data of the model.
DEFAULT_STEPS, STEPS_OF_COORDS = "vkkvkvk", "vkkkkvkvk"


def sorted_rung(k: int, v: int, coords: bool = False) -> Rung:
    """Of a layer whose keys have risen k times and whose values v times."""
    top, keys = v == len(SORTED_VALUES) - 1, COORD_KEYS if coords else SORTED_KEYS
    return (*keys[k if top else min(k, len(keys) - 2)], SORTED_VALUES[v])


def sorted_order(text: str, n_layer: int, coords: bool = False) -> list[tuple[int, str]]:
    """(layer, "k" or "v") in the order in which they rise. ValueError when the text is none."""
    if text == "none":
        return [(i, side) for side in (STEPS_OF_COORDS if coords else DEFAULT_STEPS) for i in spread(n_layer)]
    out = [(int(word[:-1]), word[-1]) for word in text.split(".")]
    sides = "k" * (len(COORD_KEYS if coords else SORTED_KEYS) - 1) + "v" * (len(SORTED_VALUES) - 1)
    if sorted(out) != sorted((i, side) for i in range(n_layer) for side in sides):
        raise ValueError(f"order={text} does not name each of {n_layer} layers {sides} times")
    return out


def spread(n: int) -> list[int]:
    """Layers 0..n-1, first 0, then the middle, then the quarters: a counter with its bits reversed."""
    width = max((n - 1).bit_length(), 0)
    reverse = [int(f"{i:0{width}b}"[::-1], 2) if width else 0 for i in range(1 << width)]
    return [at for at in reverse if at < n]


def code_bits(rung: Rung) -> float:
    """Bits of a key and a value."""
    return (rung[0] + rung[1]) / 2 + rung[2]


def order_of(text: str, n_layer: int, rungs: tuple[Rung, ...] = WHOLE) -> list[int]:
    """Layers in the order in which they rise, each as often as there are rungs above the first. ValueError when the
    text is none."""
    if text == "none":
        upper, lower = ([i for i in spread(n_layer) if (2 * i >= n_layer) == side] for side in (True, False))
        between = [half for _ in range(len(rungs) - 2) for half in (upper, lower)]
        return [i for half in (upper, *between, lower) for i in half]
    out = [int(word) for word in text.split(".")]
    if sorted(out) != sorted(list(range(n_layer)) * (len(rungs) - 1)):
        raise ValueError(f"order={text} does not name each of {n_layer} layers {len(rungs) - 1} times")
    return out


@register
class Auto(LatticeMethod):
    """A layer stands on as many rungs as it occurs among the first `level` entries of `order`. level=-1 is the highest
    level whose allocated bytes are within `bits`, which cache/level.cpp finds: layouts are the library's alone. Keys
    are split (lattice.py) where `pairs` says how and means are taken off. One level above the highest rungs has scales
    of 8 bits instead of 4."""

    name = "auto"
    options: ClassVar[dict[str, Any]] = {
        "bits": 0.0,
        "at": 0,
        "level": -1,
        "order": "none",
        "pairs": "none",
        "means": "auto",
        "predictor": "none",
        "predictors": "off",
        "coords": 0,
        "coordinates": "auto",
        "alone": "none",
        "weights": "auto",
        "window": 64,
        **{key: value for key, value in LATTICE_OPTIONS.items() if key != "grid"},
        "sinks": 4,
        "scales": "auto",
        "far": "none",
        "top": 64,
        "prompt": "exact",
    }

    def plan(self, ordinal: int, n_layer: int, shape: LayerShape, prev: LayerShape | None) -> LayerPlan:
        splits = self.o["pairs"] != "none" and self.o["means"] != "off"
        order = self.o["order"] if splits or self.o["pairs"] == "none" else "none"
        level = max(self.o["level"], 0)
        predictor = {"none": "full" if self.o["predictors"] == "on" else "none", "auto": "full"}.get(
            self.o["predictor"], self.o["predictor"]
        )
        sorts = splits and (predictor != "none" or self.o["pairs"] == "sorted")
        predicts = predictor != "none" and str(ordinal) not in self.o["alone"].split(".")
        if sorts:
            coords = self.o["coords"] > 0
            sides = sorted_order(order, n_layer, coords)
            top, sides = len(sides), sides[:level]
            self.rung = sorted_rung(sides.count((ordinal, "k")), sides.count((ordinal, "v")), coords)
        else:
            rungs = RUNGS if splits else WHOLE
            rises = order_of(order, n_layer, rungs)
            top = len(rises)
            self.rung = rungs[rises[:level].count(ordinal)]
        if predicts and prev is None:  # nothing predicts it: AQUA-KV section 4
            self.rung = (4, 4, 4)
        fast, slow, _ = self.rung
        sorts = sorts and not (predicts and prev is None)
        splits = splits and shape.head_size_k % 16 == 0
        sorts = sorts and splits
        halves = splits and (fast != slow or (sorts and predicts))  # else one block, which takes the gains alone
        if not halves:
            self.rung = max((fast + slow) // 2, 1), max((fast + slow) // 2, 1), self.rung[2]
        given = dict(self.o)
        self.o["grid"] = "d2"
        if given["scales"] == "auto":  # the last level, above the highest rungs
            self.o["scales"] = "u8" if level > top else "u4"
        plan = super().plan(ordinal, n_layer, shape, prev)
        self.o = given
        plan = replace(plan, mean=self.o["means"] == "on")
        if plan.mean and str(ordinal) not in self.o["alone"].split("."):
            plan = replace(plan, k=replace(plan.k, codec=plan.k.codec.with_(coords=self.o["coords"])))
        if halves:
            split = SPLIT_NEOX if self.o["pairs"] == "neox" and not sorts else SPLIT_NORM
            plan = replace(plan, k=replace(plan.k, codec=plan.k.codec.with_(split=split, fast_bits=fast)))
        plan = replace(plan, sort=plan.mean and sorts)
        if plan.mean and predicts:
            chain = {"k": "k", "full": "kv", "fold": "kk"}[predictor]
            plan = replace(plan, chain=chain, weights=4 if self.o["weights"] == "4" else 8)
        if self.o["far"] == "none":
            return plan
        return replace(
            plan, top=self.o["top"], far=self.o["far"], fetch="now", exact=self.o["prompt"] == "exact"
        )  # as specache

    def bits(self, role: int, ordinal: int) -> int:
        return self.rung[2 if role == V else 1]
