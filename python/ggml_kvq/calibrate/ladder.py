"""The ladders of method auto (reference/auto.py) as what rises on them: layers, or the keys and the values of a layer.

A riser is (layer, side), side "" for whole layers, "k" or "v". D(riser, rung) is the divergence from the f16 cache when
that riser stands on `rung` and all others on the highest one, less the divergence with all of them there. Divergences
of risers about add up, so the best mixture for any number of bits rises along the steepest remaining step,
(D(riser, rung) - D(riser, rung + n)) / bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..reference.auto import COORD_KEYS, RUNGS, SORTED_KEYS, SORTED_VALUES, WHOLE, code_bits, spread
from .order import ERRORS

Riser = tuple[int, str]


@dataclass(frozen=True)
class Ladder:
    """bits[side]: code bits of that side on each rung. pairs: option of method auto."""

    pairs: str
    bits: Mapping[str, Sequence[float]]

    def top(self, riser: Riser) -> int:
        """Its highest rung."""
        return len(self.bits[riser[1]]) - 1

    def risers(self, n_layer: int) -> list[Riser]:
        return [(il, side) for il in range(n_layer) for side in self.bits]

    def text(self, order: Sequence[Riser]) -> str:
        """As option `order` has it."""
        return ".".join(f"{il}{side}" for il, side in order)

    def standing(self, n_layer: int, low: Mapping[Riser, int]) -> dict[str, object]:
        """Options of method auto: risers of `low` on the rungs it names, all others on the highest."""
        risers = self.risers(n_layer)
        order = [r for r in risers for _ in range(low.get(r, self.top(r)))]
        later = [r for r in low for _ in range(self.top(r) - low[r])]
        return {"pairs": self.pairs, "order": self.text([*order, *later]), "level": len(order)}


def of(pairs: str, coords: bool = False) -> Ladder:
    """The ladder of such keys (means.Means.pairs); coords: they have coordinates."""
    if pairs == "sorted":
        keys = COORD_KEYS if coords else SORTED_KEYS
        return Ladder(pairs, {"k": [sum(half) / 2 for half in keys], "v": [float(x) for x in SORTED_VALUES]})
    return Ladder(pairs, {"": [code_bits(rung) for rung in (WHOLE if pairs == "none" else RUNGS)]})


#: What a square error of values, as a share of their energy, costs beside one of logits. Of 0.5, 1.5, 3 and 6 the one
#: of least divergence at 1.75 and 2.25 bits, on three pretrained models.
VALUES = 3.0
#: The same where predictors are taken off. Of 0.5, 1, 1.5 and 3 the one of least divergence on two pretrained models.
VALUES_LEFT = 1.0


def estimated(
    logit_errors: Mapping[int, Sequence[float]], left: Mapping[int, float] | None = None
) -> dict[Riser, list[float]]:
    """Damage of sorted keys and of values before anything is tried. logit_errors: by layer, of keys on each rung. left:
    by layer, the share of values' energy that predictors leave; of layers that are not in it nothing is predicted.
    """
    left = left or {}
    out: dict[Riser, list[float]] = {}
    for il in spread(len(logit_errors)):  # of equals, layers that are far apart rise first
        out[il, "k"] = list(logit_errors[il])
        out[il, "v"] = [(VALUES_LEFT * left[il] if il in left else VALUES) * ERRORS[bits] for bits in SORTED_VALUES]
    return out


def climb_evenly(
    damage: Mapping[Riser, Sequence[float]],
    ladder: Ladder,
    groups: Sequence[Collection[int]],
    ahead: Sequence[float] | None = None,
) -> list[Riser]:
    """climb() in each group of layers. A level gives all groups about as many bits a layer: groups are layers of one
    cache, and each cache keeps to the number that was asked for. A group rises when its step leaves it lowest, so that
    one of few layers, whose steps are large, stays below the others rather than above. ahead: bits of a layer's
    key and value by which a group may be ahead of the others.
    """
    orders = [climb({r: d for r, d in damage.items() if r[0] in group}, ladder) for group in groups]
    order: list[Riser] = []
    at, taken = dict.fromkeys(damage, 0), [-x for x in ahead or [0.0] * len(groups)]

    def after(g: int) -> float:
        riser = orders[g][0]
        bits = ladder.bits[riser[1]]
        return taken[g] + (bits[at[riser] + 1] - bits[at[riser]]) / len(groups[g])

    while any(orders):
        g = min((i for i, left in enumerate(orders) if left), key=after)
        taken[g] = after(g)
        riser = orders[g].pop(0)
        at[riser] += 1
        order.append(riser)
    return order


def climb(damage: Mapping[Riser, Sequence[float]], ladder: Ladder) -> list[Riser]:
    """damage[riser][rung] -> risers in the order in which they rise, each to the last rung: always the step that takes
    most divergence away per bit, looking ahead over the rungs of a riser.
    """
    at = dict.fromkeys(damage, 0)
    order: list[Riser] = []

    def top(riser: Riser) -> int:
        values = (riser[0], "v")
        waits = riser[1] == "k" and at[values] < ladder.top(values)  # sorted_rung(): the last rung is for both
        return ladder.top(riser) - waits

    def slope(riser: Riser) -> float:
        d, b, r = damage[riser], ladder.bits[riser[1]], at[riser]
        return max(((d[r] - d[to]) / (b[to] - b[r]) for to in range(r + 1, top(riser) + 1)), default=-1.0)

    while waiting := [r for r in damage if at[r] < top(r)]:
        riser = max(waiting, key=slope)
        at[riser] += 1
        order.append(riser)
    return order
