"""Mixed blocks (ZipCache, arXiv 2405.14256): the salient cells of a page in `hi` bits, the others in `bits`. The
definition of every byte.

A set of n_hi cells, one bit a cell, is given to encode and stored. Part 0 holds the cells of the set in cell order,
part 1 the others; each is an affine block of its own (affine.py) with eta for part 1 only, and a part without cells
has no bytes.

    keys     one (scale, zero) per channel and part                                              (section 4.2,
    channel-wise) values   c_i = sqrt(max_t |x_ti|), 1 when that is 0, as an f16 of 3 mantissa bits, c_i = the f16 byte
    << 7; the parts hold f16(x_ti / c_i), one (scale, zero) per cell;
             decoded = f16(c_i * decoded part)                                                   (channel-separable,
             equation 6)

params: set [n_cells / 8], for values u8 c [head_size], parameters of part 0, of part 1. codes: part 0, part 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import affine
from .codec import AFFINE, Codec, K, V, to_f16, unpack_valid


def part(c: Codec, i: int) -> Codec:
    """Part i as an affine block; n_cells 0: the page has no such cells."""
    n = c.n_cells - c.n_hi if i else c.n_hi
    group = n if c.role == K else c.head_size
    return c.with_(
        type=AFFINE, bits=c.bits if i else c.hi, n_cells=n, group=group, eta=c.eta if i else 0.0, hi=0, n_hi=0
    )


def _sizes(c: Codec, i: int) -> tuple[int, int]:
    return affine.nbytes(part(c, i)) if part(c, i).n_cells else (0, 0)


def _channels(c: np.ndarray) -> np.ndarray:
    """uint8 -> f16."""
    return (c.astype(np.uint16) << 7).view(np.float16)


def nbytes(c: Codec) -> tuple[int, int]:
    """(nb_codes, nb_params) in bytes."""
    (c0, p0), (c1, p1) = _sizes(c, 0), _sizes(c, 1)
    return c0 + c1, c.n_cells // 8 + (c.head_size if c.role == V else 0) + p0 + p1


def split(
    c: Codec, codes: np.ndarray, params: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None, list[tuple[np.ndarray, np.ndarray]]]:
    """-> set bool [n_cells], channels f16 [head_size] or None, [(codes, params)] of the two parts."""
    at = c.n_cells // 8
    salient = unpack_valid(params[:at], c.n_cells)
    channels = None
    if c.role == V:
        channels, at = _channels(params[at : at + c.head_size]), at + c.head_size
    (c0, p0), (c1, p1) = _sizes(c, 0), _sizes(c, 1)
    return (
        salient,
        channels,
        [(codes[:c0], params[at : at + p0]), (codes[c0 : c0 + c1], params[at + p0 : at + p0 + p1])],
    )


def encode(
    c: Codec,
    rows: np.ndarray,
    valid: np.ndarray | None = None,
    shared: np.ndarray | None = None,
    salient: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """rows f16 [n_cells, head_size], salient bool [n_cells] -> (codes, params), uint8.

    salient: the set; None, or one of another size than n_hi: the first n_hi cells.
    """
    if salient is None or salient.sum() != c.n_hi:
        salient = np.arange(c.n_cells) < c.n_hi
    ok = unpack_valid(valid, c.n_cells)
    codes, params = [], [np.packbits(salient, bitorder="little")]
    if c.role == V:
        x = np.abs(rows.astype(np.float32))
        x = np.where(np.isfinite(x) & ok[:, None], x, np.float32(0)).max(axis=0)
        channels = np.where(x > 0, np.sqrt(x), np.float32(1)).astype(np.float16)
        params.append((channels.view(np.uint16) + np.uint16(64) >> 7).astype(np.uint8))
        channels = _channels(params[-1])
        with np.errstate(over="ignore", invalid="ignore"):
            rows = (rows.astype(np.float32) / channels.astype(np.float32)).astype(np.float16)
    for i, cells in enumerate((salient, ~salient)):
        if cells.any():
            block = affine.encode(part(c, i), rows[cells], np.packbits(ok[cells], bitorder="little"))
            codes.append(block[0])
            params.append(block[1])
    return np.concatenate(codes), np.concatenate(params)


def _join(
    c: Codec, codes: np.ndarray, params: np.ndarray, by_part: Callable[..., np.ndarray], dtype: Any
) -> np.ndarray:
    salient, _, blocks = split(c, codes, params)
    out = np.zeros((c.n_cells, c.head_size), dtype)
    for i, cells in enumerate((salient, ~salient)):
        if part(c, i).n_cells:
            at = np.flatnonzero(cells)[: part(c, i).n_cells]
            out[at] = by_part(part(c, i), *blocks[i])[: at.size]
    return out


def exact(c: Codec, codes: np.ndarray, params: np.ndarray) -> np.ndarray:
    """Before any rounding to f16: f64 [n_cells, head_size]."""
    x = _join(c, codes, params, affine.exact, np.float64)
    channels = split(c, codes, params)[1]
    return x if channels is None else x * channels.astype(np.float64)


def decode(c: Codec, codes: np.ndarray, params: np.ndarray) -> np.ndarray:
    """-> f16 [n_cells, head_size]."""
    x = _join(c, codes, params, affine.decode, np.float16)
    channels = split(c, codes, params)[1]
    if channels is None:
        return x
    with np.errstate(invalid="ignore"):
        return to_f16(x.astype(np.float32) * channels.astype(np.float32))


def match(c: Codec, rows: np.ndarray, mask: int, params: np.ndarray, shared: np.ndarray | None) -> np.ndarray | None:
    """Codes under which `params` reproduce rows up to the mantissa bits in `mask`, None when there are none; the
    smallest of several.
    """
    keep = np.uint16(~mask & 0xFFFF)
    salient, channels, blocks = split(c, np.zeros(nbytes(c)[0], np.uint8), params)
    if salient.sum() != c.n_hi:
        return None
    out = []
    for i, cells in enumerate((salient, ~salient)):
        p = part(c, i)
        if not p.n_cells:
            continue
        scale, zero = (affine.per_value(p, x) for x in affine.get_params(p, blocks[i][1]))
        want = rows[cells].view(np.uint16) & keep
        found, codes = np.zeros(want.shape, bool), np.zeros(want.shape, np.uint8)
        for q in range(1 << p.bits):
            with np.errstate(invalid="ignore"):
                y = to_f16(zero + scale * np.float32(q))
                if channels is not None:
                    y = to_f16(y.astype(np.float32) * channels.astype(np.float32))
            hit = ((y.view(np.uint16) & keep) == want) & ~found
            codes[hit] = q
            found |= hit
        if not found.all():
            return None
        out.append(affine.pack(p, codes))
    return np.concatenate(out)
