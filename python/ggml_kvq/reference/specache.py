"""SpeCache (Jie et al., ICML 2025, arXiv 2503.16163): a copy of every cell in one or two bits near, the rows as they
came far, of which attention fetches the few that the copy gives most attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from . import attention
from .aqua import Aqua
from .higgs import Higgs
from .kivi import Kivi
from .method import LayerPlan, LayerShape, Method, register

FAR_FORMATS = ("f16", "q8", "q4")  # kvq_far_format
FETCHES = ("off", "now", "ahead", "all")  # kvq_fetch
#: Channels of a far row that share a scale.
FAR_BLOCK = 32
#: Rows of a KV head that attention can hold beside it (fetch=ahead), at most.
KEPT_MOST = 2048
#: The largest scale of q8, so that 127 of it are a finite f16.
Q8_MOST = np.float32(515.5)


def far_row_bytes(form: str, head_size: int) -> int:
    """Bytes of a far row of one KV head (types/far_rows.h)."""
    if form == "f16":
        return 2 * (-(-head_size // 16) * 16)
    blocks = -(-head_size // FAR_BLOCK)
    return -(-blocks * ((FAR_BLOCK if form == "q8" else FAR_BLOCK // 2) + 2) // 8) * 8


def far_encode(form: str, rows: np.ndarray) -> np.ndarray:
    """f16 [n, head_size] -> uint8 [n, far_row_bytes].

    q8: scale = max |x| / 127; q4: scale = (the value of largest magnitude) / -8; code = round(x / scale), scales f16.
    """
    n, d = rows.shape
    if form == "f16":
        out = np.zeros((n, far_row_bytes(form, d) // 2), np.float16)
        out[:, :d] = rows
        return out.view(np.uint8)
    blocks = -(-d // FAR_BLOCK)
    x = np.zeros((n, blocks, FAR_BLOCK), np.float32)
    x.reshape(n, -1)[:, :d] = rows.astype(np.float32)
    most = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)[..., 0]
    q8 = np.minimum(np.abs(most) / np.float32(127), Q8_MOST)
    scale = (q8 if form == "q8" else most / np.float32(-8)).astype(np.float16)
    s = scale.astype(np.float32)
    by = np.divide(np.float32(1), s, out=np.zeros_like(s), where=s != 0)
    code = np.rint(x * by[..., None])
    if form == "q8":
        codes = np.clip(code, -127, 127).astype(np.int8).view(np.uint8)
    else:
        q = (np.clip(code, -8, 7) + 8).astype(np.uint8)
        codes = q[..., :16] | q[..., 16:] << 4
    out8 = np.zeros((n, far_row_bytes(form, d)), np.uint8)
    packed = np.concatenate([codes.reshape(n, -1), scale.view(np.uint8).reshape(n, -1)], axis=1)
    out8[:, : packed.shape[1]] = packed
    return out8


def far_decode(form: str, far: np.ndarray, head_size: int) -> np.ndarray:
    """uint8 [n, far_row_bytes] -> f16 [n, head_size]."""
    n = len(far)
    if form == "f16":
        return np.ascontiguousarray(far).view(np.float16)[:, :head_size]
    blocks = -(-head_size // FAR_BLOCK)
    nb = FAR_BLOCK if form == "q8" else FAR_BLOCK // 2
    codes = far[:, : blocks * nb].reshape(n, blocks, nb)
    scale = np.ascontiguousarray(far[:, blocks * nb : blocks * (nb + 2)]).view(np.float16).astype(np.float32)
    if form == "q8":
        code = codes.view(np.int8).astype(np.float32)
    else:
        code = np.concatenate([codes & 15, codes >> 4], axis=-1).astype(np.float32) - 8
    return (scale[..., None] * code).reshape(n, -1)[:, :head_size].astype(np.float16)


def picks(scores: np.ndarray, candidates: np.ndarray, top: int) -> np.ndarray:
    """The `top` candidates of highest score above 0, earlier cells first when equal: ascending cells.

    scores f64 [n_cells], candidates bool [n_cells].
    """
    cells = np.flatnonzero(candidates & (scores > 0))
    order = np.lexsort((cells, -scores[cells]))
    return np.sort(cells[order[:top]])


def keep(kept: np.ndarray, picked: Sequence[np.ndarray], n_kept: int, top: int) -> np.ndarray:
    """Cells whose far rows the next step reads with fetch=ahead, of one KV head, at most n_kept.

    picked: what each token of this step picked, ascending, `top` cells at most. The last n_kept // top tokens put
    theirs in front, one after the other; behind them stay those `kept` before, which are still there, in the order they
    had. Rows that were not picked for the longest time go first.
    """
    for mine in picked[-max(n_kept // max(top, 1), 1) :]:
        kept = np.concatenate([mine, kept[~np.isin(kept, mine)]])[:n_kept]
    return kept


def attend(
    q: np.ndarray,
    near: tuple[np.ndarray, np.ndarray],
    far: tuple[np.ndarray, np.ndarray],
    sealed: np.ndarray,
    top: int,
    mask: np.ndarray,
    scale: float,
    max_bias: float = 0.0,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
    given: list[np.ndarray] | None = None,
) -> tuple[np.ndarray, list[list[np.ndarray]]]:
    """Attention over two tiers: f64 [n_q, n_head, dv], and the picks of every query token and KV head.

    near, far: keys and values [n_head_kv, n_cells, d], near ones as attention reads them without a second tier; sealed
    bool [n_cells]: cells that have far rows. A cell's score is the sum of its probabilities over the query heads of a
    KV head (section 3.3). given: cells kept for each KV head that every token reads in place of its own picks
    (fetch=ahead). The other arguments as in attention.attend.
    """
    n_q, n_head = q.shape[:2]
    n_kv = near[0].shape[0]
    group = n_head // n_kv
    p = attention.weights(attention.logits(q, near[0], mask, scale, max_bias, softcap), sinks)
    out = np.zeros((n_q, n_head, near[1].shape[2]))
    chosen: list[list[np.ndarray]] = []
    for i in range(n_q):
        mine = [picks(p[i, h * group : (h + 1) * group].sum(axis=0), sealed, top) for h in range(n_kv)]
        chosen.append(mine)
        k, v = near[0].astype(np.float64), near[1].astype(np.float64)
        for h, cells in enumerate(mine if given is None else given):
            k[h, cells], v[h, cells] = far[0][h, cells], far[1][h, cells]
        out[i] = attention.attend(q[i : i + 1], k, v, mask[i : i + 1], scale, max_bias, softcap, sinks)[0]
    return out, chosen


PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    "paper1": {"near": "kivi", "bits": 1, "eta": 0.25, "group": 64, "sinks": 0, "scales": "f16"},
    "paper2": {"near": "kivi", "bits": 2, "eta": 0.0, "group": 64, "sinks": 0, "scales": "f16"},
}


@register
class SpeCache(Method):
    """Near copies are kivi's, higgs's or aqua's blocks (near=auto: aqua where there is calibrated data, else higgs);
    the paper's have 2 bits, or 1 bit at the quartiles of the range (eta 1/4, section 3.2).
    """

    name = "specache"
    options: ClassVar[dict[str, Any]] = {
        "near": "auto",
        "preset": "none",
        "bits": 2,
        "k_bits": 0,
        "v_bits": 0,
        "top": 64,
        "far": "f16",
        "place": "host",
        "fetch": "now",
        "kept": 0,
        "prompt": "exact",
        "levels": "ends",
        "eta": 0.0,
        "group": 32,
        "group_v": 0,
        "grid": "auto",
        "window": 64,
        "sinks": 4,
        "scales": "u8",
        "precision": "int8",
    }

    def plan(self, ordinal: int, n_layer: int, shape: LayerShape, prev: LayerShape | None) -> LayerPlan:
        o = dict(self.o)
        o.update({k: v for k, v in PRESETS[o["preset"]].items() if k not in self.given})
        near: type[Method] = {"kivi": Kivi, "aqua": Aqua}.get(o["near"], Higgs)
        o.update(predictor="bias", weights="8", first_bits=0)
        its = near(**{k: v for k, v in o.items() if k in near.options})
        plan = its.plan(ordinal, n_layer, shape, prev)
        kept = (o["kept"] or min(4 * o["top"], KEPT_MOST)) if o["fetch"] == "ahead" else 0
        return replace(
            plan,
            top=o["top"],
            kept=kept,
            far=o["far"],
            place=o["place"],
            fetch=o["fetch"],
            exact=o["prompt"] == "exact",
        )
