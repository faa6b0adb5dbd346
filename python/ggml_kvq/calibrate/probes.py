"""Which keys and values of a model deserve bits, from a few short runs: what `order` of method auto says when a model is
used for the first time. ggml-kvq tune measures every layer, on longer texts.

A probe is a run of LENGTH tokens in which the keys, or the values, of some neighbouring layers stand on the lowest rung
and all others on the highest; its divergence from the f16 cache, less that of a run with all on the highest, is the
damage of that group. Groups begin large. As long as probes are left the group that does most damage is cut in two, and
one half is measured: few layers do most of the damage, and they are found in few steps. A group's damage is shared
equally by its layers, and falls from rung to rung as the error of its codes does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import KvqError
from ..evaluate import metrics
from ..model import Model
from . import ladder
from .ladder import Ladder, Riser

LENGTH, BATCH = 512, 64  # tokens that are read, so many at once: rows of a batch see each other exactly
SCORED = 128  # predictions that count, of the second half
PROBES, FIRST = 24, 4  # runs at most; groups of each side that all models begin with
#: Squared error of a unit Gaussian's codes by bits (reference/lattice.py, grids of two channels).
ERROR = {1: 0.3635, 2: 0.1089, 3: 0.0300, 4: 0.0083}
#: Damage on each rung as a share of that on the lowest: sorted keys as measured on three models, values by ERROR.
FALL = {"k": (1.0, 0.31, 0.145, 0.075, 0.02), "v": tuple(ERROR[b] / ERROR[1] for b in (1, 2, 3, 4))}

Logits = npt.NDArray[np.float32]


def order(
    path: str | os.PathLike[str],
    sidecar: Path,
    text: str,
    n_layer: int,
    *,
    n_threads: int | None = None,
    n_probes: int = PROBES,
    say: Callable[[str], None] = lambda _: None,
) -> str:
    """Option `order` of method auto for a model whose sidecar holds sorted keys. KvqError for a text of fewer than
    LENGTH tokens and for a model that method auto refuses.
    """
    rungs = ladder.of("sorted")
    with _open(path, "upstream", {}, None, n_threads) as model:
        ids = np.asarray(model.tokenize(text, add_bos=True)[:LENGTH], np.int32)
        if len(ids) < LENGTH:
            raise KvqError(f"a text of {len(ids)} tokens is too short to compare caches on; give {LENGTH}")
        exact = _logits(model, ids)

    def divergence(low: list[Riser]) -> float:
        opts = rungs.standing(n_layer, dict.fromkeys(low, 0))
        with _open(path, "auto", opts, sidecar, n_threads) as model:
            return _divergence(exact, _logits(model, ids))

    least = divergence([])
    damage = shares(lambda low: divergence(low) - least, rungs, n_layer, n_probes, say)
    return rungs.text(ladder.climb({r: [d * f for f in FALL[r[1]]] for r, d in damage.items()}, rungs))


def shares(
    damage_of: Callable[[list[Riser]], float],
    rungs: Ladder,
    n_layer: int,
    n_probes: int,
    say: Callable[[str], None] = lambda _: None,
) -> dict[Riser, float]:
    """Damage of every riser on the lowest rung, from at most n_probes calls of damage_of(risers on that rung)."""
    n_first = min(FIRST, n_layer)
    cuts = [i * n_layer // n_first for i in range(n_first + 1)]
    groups = [[(il, side) for il in range(a, b)] for side in rungs.bits for a, b in zip(cuts, cuts[1:])]
    found: list[tuple[float, list[Riser]]] = []
    for done, group in enumerate(groups):
        say(f"probe {done + 1} of at most {n_probes}")
        found.append((max(damage_of(group), 1e-9), group))
    for done in range(len(groups), n_probes):
        damage, group = max((x for x in found if len(x[1]) > 1), default=(0.0, []), key=lambda x: x[0])
        if not group:
            break
        found.remove((damage, group))
        say(f"probe {done + 1} of at most {n_probes}")
        first, second = group[: len(group) // 2], group[len(group) // 2 :]
        part = min(max(damage_of(first), 0.02 * damage), 0.98 * damage)
        found += [(part, first), (damage - part, second)]
    return {riser: damage / len(group) for damage, group in found for riser in group}


def _divergence(exact: Logits, other: Logits) -> float:
    """Mean KL divergence of rows of logits, nats."""
    p, q = (metrics.log_softmax(x).astype(np.float64) for x in (exact, other))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def _open(
    path: str | os.PathLike[str], method: str, opts: dict[str, object], config: Path | None, n_threads: int | None
) -> Model:
    return Model(
        path, kv_method=method, kv_opts=opts, kv_config=config or "none", n_ctx=LENGTH, n_batch=BATCH, n_ubatch=BATCH,
        n_threads=n_threads,
    )  # fmt: skip


def _logits(model: Model, ids: npt.NDArray[np.int32]) -> Logits:
    """Of SCORED tokens, spread over the second half."""
    wanted = np.zeros(len(ids), bool)
    wanted[len(ids) // 2 :: max(1, len(ids) // 2 // SCORED)] = True
    model.reset()
    return np.concatenate([rows.copy() for rows in model.feed(ids, outputs=wanted)])
