"""The ladders of method auto (reference/auto.py) as what rises on them: layers, or the keys and the values of a layer.

A riser is (layer, side), side "" for whole layers, "k" or "v". D(riser, rung) is the divergence from the f16 cache when
that riser stands on `rung` and all others on the highest one, less the divergence with all of them there. Divergences
of risers about add up, so the best mixture for any number of bits rises along the steepest remaining step,
(D(riser, rung) - D(riser, rung + n)) / bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..reference.auto import RUNGS, SORTED_KEYS, SORTED_VALUES, WHOLE, code_bits

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


def of(pairs: str) -> Ladder:
    """The ladder of such keys (means.Means.pairs)."""
    if pairs == "sorted":
        return Ladder(pairs, {"k": [sum(half) / 2 for half in SORTED_KEYS], "v": [float(x) for x in SORTED_VALUES]})
    return Ladder(pairs, {"": [code_bits(rung) for rung in (WHOLE if pairs == "none" else RUNGS)]})


def climb(damage: Mapping[Riser, Sequence[float]], ladder: Ladder) -> list[Riser]:
    """damage[riser][rung] -> risers in the order in which they rise, each to the last rung: always the step that takes
    most divergence away per bit, looking ahead over the rungs of a riser.
    """
    at = dict.fromkeys(damage, 0)
    order: list[Riser] = []

    def slope(riser: Riser) -> float:
        d, b, r = damage[riser], ladder.bits[riser[1]], at[riser]
        return max(((d[r] - d[to]) / (b[to] - b[r]) for to in range(r + 1, ladder.top(riser) + 1)), default=-1.0)

    while waiting := [r for r in damage if at[r] < ladder.top(r)]:
        riser = max(waiting, key=slope)
        at[riser] += 1
        order.append(riser)
    return order
