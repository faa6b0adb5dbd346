"""What kvq_attend may return for a case of attention_cases.py: a value and a bound per output.

eps = 2^-24. Two references, both f64:

exact    softmax over the decoded values. Folding q*scale to two bytes errs by at most amax/254/254 per weight, amax =
max |q*scale| of
         a cell group, so by amax/254/254 * sum code per logit; folding p*scale to 8 bits without sign by top/510, top
         = max p * max scale of a page's channel group, times |code - middle|: what rounding takes is given back at the
         middle code (cpu/kernels.h).
folded   the same with the folding carried out: w8 = rint(127 x/amax) (a query's rest follows in steps of 1/254), sum
x*zero +
         amax/127 * sum code*w8. What remains is f32 arithmetic, and one step times code for every weight so near to a
         tie that f32 may round it to the other side.

f32 arithmetic: a logit errs by (dk + 32) eps sum |terms|; scale, cap, bias and maximum by 32 eps of their sizes. A
logit error d_t moves the softmax weight w_t by a factor within exp(+-(d_t + max d)); exp and sums add (slots + 64) eps
+ 1e-6 to that factor's distance r_t from 1. Outputs err by sum w_t r_t (|v_t| + |out|), and by (slots + 64) eps of
their terms.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from attention_cases import Case, build
from ggml_kvq.reference import K, V, attention

EPS = 2.0**-24
FINE = 254


def heads(c: Case, *arrays: np.ndarray) -> list[np.ndarray]:
    """[n_head_kv, ...] -> f64 [n_head, ...]."""
    return [np.repeat(a.astype(np.float64), c.gqa, axis=0) for a in arrays]


def fold(
    x: np.ndarray, spread: np.ndarray | float, top: np.ndarray | None = None, levels: int = 127, fine: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [..., n] -> (step [..., 1], w8 [..., n], flips [..., n]): 8-bit weights under top (default max |x|) in the
    kernel's own f32 operations, and by how many steps w8 may be off when x/top is known up to the relative error
    `spread` (0: exactly). fine: steps of a second byte that takes what the first one left.
    """
    x = x.astype(np.float32)
    amax = np.abs(x).max(axis=-1, keepdims=True) if top is None else top.astype(np.float32)
    y = x * np.divide(np.float32(levels), amax, out=np.zeros_like(amax), where=amax > 0)
    w8 = np.rint(y).astype(np.float64)
    if fine > 1:
        w8 += np.rint((y - np.rint(y)) * np.float32(fine)).astype(np.float64) / fine
    steps = y.astype(np.float64) * fine
    far = np.abs(steps) * (np.asarray(spread) + 4 * EPS * (np.asarray(spread) > 0))
    near = (np.abs(steps - np.floor(steps) - 0.5) <= far) & (far > 0)
    return (amax.astype(np.float64) / levels, w8, np.where(near, np.floor(far) + 1, 0) / fine)


@cache
def expected(c: Case, folded: bool) -> tuple[np.ndarray, np.ndarray]:
    """(value, bound) f64 [n_q, n_head, dv]."""
    b = build(c)
    n, scale = b.cells.size, float(np.float32(1 / np.sqrt(c.dk)))
    q, mask = b.q.astype(np.float64), b.slot_mask()
    raw = np.einsum("ihd,htd->iht", q, *heads(c, b.k))
    sizes = np.einsum("ihd,htd->iht", np.abs(q), *heads(c, np.abs(b.k)))  # sum |terms|
    logit_error = np.zeros_like(raw)
    for at, s, z, code in b.lanes[K]:
        s, z, code = heads(c, s, z, code)
        for cell in range(0, c.page_cells, 16):  # key parameters are constant over 16 cells
            here, codes = slice(at + cell, at + cell + 16), code[:, cell : cell + 16]
            # 8-bit scales are low + step*u8, rounded once or twice
            step, w8, flips = fold(b.q * s[:, cell].astype(np.float32), 2 * EPS * c.u8, fine=FINE)
            # the code sum is an exact integer: a few roundings of its product with the step
            sizes[:, :, here] = (np.abs(q) * np.abs(z[:, cell])).sum(-1)[..., None] + 127 * step * codes.sum(-1) * 8 / (
                c.dk + 32
            )
            if folded:
                raw[:, :, here] = (q * z[:, cell]).sum(-1)[..., None] + step * np.einsum("ihd,htd->iht", w8, codes)
                logit_error[:, :, here] = step * np.einsum("ihd,htd->iht", flips, codes)
            else:
                logit_error[:, :, here] = step / 2 / FINE * (1 + 1e-3) * codes.sum(-1)
    x = raw * scale
    if c.softcap:
        x = c.softcap * np.tanh(x / c.softcap)
    bias = np.broadcast_to(
        attention.alibi_slopes(c.n_head, c.max_bias)[:, None] * np.where(np.isneginf(mask), 0, mask), x.shape
    )
    seen = np.broadcast_to(~np.isneginf(mask), x.shape)
    x = np.where(seen, x + bias, -np.inf)
    w = attention.weights(x, b.sinks)

    size = np.where(seen, np.abs(np.where(seen, x, 0)) + np.abs(bias), 0.0)
    arithmetic = scale * (c.dk + 32) * EPS * sizes + 32 * EPS * (size + size.max(-1, keepdims=True) + c.softcap + 1)
    if b.sinks is not None:
        arithmetic = arithmetic + 32 * EPS * np.abs(b.sinks)[:, None]
    d = np.where(seen, arithmetic + scale * logit_error, 0.0)
    rounding = (n + 64) * EPS
    r = np.expm1(d + d.max(-1, keepdims=True)) + rounding + 1e-6  # relative error of a weight

    (v,) = heads(c, b.v)
    out, size, jumps = np.einsum("iht,htd->ihd", w, v), np.abs(v), 0.0
    for at, s, z, code in b.lanes[V]:
        s, z, code = heads(c, s, z, code)
        here = slice(at, at + c.page_cells)
        middle = (2**c.v_bits - 1) / 2
        size[:, here] = np.abs(z) + s * 2 * middle
        for channel in range(0, c.dv, min(c.group, c.dv)):
            group = slice(channel, channel + min(c.group, c.dv))
            p, codes = w[:, :, here] * s[None, :, :, channel], code[:, :, group] - middle
            top = w[:, :, here].max(-1, keepdims=True) * s[None, :, :, channel].max(-1, keepdims=True)
            step, w8, flips = fold(
                p, (r[:, :, here] + r[:, :, here].max(-1, keepdims=True)) if folded else 0.0, top, 255
            )
            add = np.zeros_like(out)
            if folded:
                exact = np.einsum("iht,htd->ihd", w[:, :, here], s[:, :, group] * codes)
                out[:, :, group] += step * np.einsum("iht,htd->ihd", w8, codes) - exact
                add[:, :, group] = step * np.einsum("iht,htd->ihd", flips, np.abs(codes))
                # the step follows the largest weight
                add[:, :, group] += (
                    step * r[:, :, here].max(-1, keepdims=True) * np.einsum("iht,htd->ihd", w8, np.abs(codes))
                )
            else:
                add[:, :, group] = step / 2 * (1 + r.max(-1, keepdims=True)) * np.abs(codes).sum(axis=1)[None]
            jumps = jumps + add
    sink = 1 - w.sum(-1, keepdims=True)
    error = np.einsum("iht,htd->ihd", w * (r + rounding), size) + (
        (w * r).sum(-1, keepdims=True) + sink * r.max(-1, keepdims=True)
    ) * np.abs(out)
    return out, error + jumps + 1e-30
