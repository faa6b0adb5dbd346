"""Affine blocks: x = zero + scale * code, 0-4 bits, parameters per group. The definition of every byte.

Group of a value: keys share parameters per channel over `group` cells, values per cell over `group` channels (KIVI
section 3). With lo, hi = extremes of the group's valid cells, r = hi - lo, n = 2^bits - 1, all in f32 and in this
order of operations:

    code  = clip(floor((x - lo) * (n / r) + 1/2), 0, n)         levels 0: rounds to end points (KIVI section 3)
    code  = clip(floor((x - lo) * ((n + 1) / r)), 0, n)         levels 1: equal bins
    zero  = lo + eta * r,  scale = (1 - 2 eta) * r / n          end points pulled inward (XQuant section 3.2)
    bits 0: no codes, zero = lo + r/2, scale = 0

inf and nan carry no value (0); a group without valid cells has zero = scale = 0. Parameters are stored as f16, or as
u8 or u4 under an f16 range of the block (value = low + step * u). Under 4-bit parameters codes come from the stored
ones: r = n scale / (1 - 2 eta), lo = zero - eta r.

Bytes of the codes. `lane` accumulates, `dot` is contracted; keys: lane = cell, dot = channel; values: lane = channel,
dot = cell. A code is stored in parts of width w: {1}, {2}, {2 low, 1 high}, {4}. A part is [tile][chunk][16 lanes][4
bytes]: byte k of lane l holds, at bits j*w.., the code of lane tile*16 + l and dot index chunk*(32/w) + 4*j + k.
Padding is zero.

Bytes of the parameters: scale[np] then zero[np] (4-bit: one byte, scale | zero << 4, a pair); np runs over [cell
group][channel] for keys, [channel group][cell] for values.
"""

from __future__ import annotations

import numpy as np

from .codec import Codec, K, to_f16, unpack_valid

PARTS = {0: (), 1: ((1, 0),), 2: ((2, 0),), 3: ((2, 0), (1, 2)), 4: ((4, 0),)}  # (width, shift within the code)
LANES = 16


def _lanes_dots(c: Codec) -> tuple[int, int]:
    return (c.n_cells, c.head_size) if c.role == K else (c.head_size, c.n_cells)


def _part_shape(c: Codec, width: int) -> tuple[int, int, int, int, int]:
    """[tile, lane, chunk, plane, byte] of a part before its planes are merged."""
    lanes, dots = _lanes_dots(c)
    return -(-lanes // LANES), LANES, -(-dots * width // 32), 8 // width, 4


def n_params(c: Codec) -> int:
    """Number of (scale, zero) pairs."""
    return c.n_cells // c.group * c.head_size if c.role == K else -(-c.head_size // c.group) * c.n_cells


def nbytes(c: Codec) -> tuple[int, int]:
    """(nb_codes, nb_params) in bytes."""
    codes = 0
    for width, _ in PARTS[c.bits]:
        tiles, lanes, chunks, _, k = _part_shape(c, width)
        codes += tiles * chunks * lanes * k
    np_ = n_params(c)
    return codes, (4 * np_, 8 + 2 * np_, 8 + np_)[c.scale]


def pack(c: Codec, codes: np.ndarray) -> np.ndarray:
    """Codes uint8 [n_cells, head_size] -> packed bytes uint8 [nb_codes]."""
    by_lane = codes if c.role == K else codes.T
    out = []
    for width, shift in PARTS[c.bits]:
        tiles, lanes, chunks, planes, k = _part_shape(c, width)
        field = np.zeros((tiles * lanes, chunks * planes * k), np.uint8)
        field[: by_lane.shape[0], : by_lane.shape[1]] = by_lane >> shift & ((1 << width) - 1)
        field = field.reshape(tiles, lanes, chunks, planes, k)
        field <<= (np.arange(planes, dtype=np.uint8) * width)[:, None]
        out.append(np.bitwise_or.reduce(field, axis=3).transpose(0, 2, 1, 3).reshape(-1))
    return np.concatenate(out) if out else np.zeros(0, np.uint8)


def unpack(c: Codec, packed: np.ndarray) -> np.ndarray:
    """Packed bytes uint8 [nb_codes] -> codes uint8 [n_cells, head_size]."""
    n_lanes, n_dots = _lanes_dots(c)
    codes, at = np.zeros((n_lanes, n_dots), np.uint8), 0
    for width, shift in PARTS[c.bits]:
        tiles, lanes, chunks, planes, k = _part_shape(c, width)
        size = tiles * chunks * lanes * k
        part = packed[at : at + size].reshape(tiles, chunks, lanes, 1, k).transpose(0, 2, 1, 3, 4)
        field = part >> (np.arange(planes, dtype=np.uint8) * width)[:, None] & ((1 << width) - 1)
        codes |= field.reshape(tiles * lanes, -1)[:n_lanes, :n_dots] << shift
        at += size
    return codes if c.role == K else codes.T


# ------------------------------------------------------------------ parameters


def _u8_param(x: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """f32 [np] -> (f16 [low, step], uint8 [np] up to top): step = (max - low) / top with the stored low, codes
    round half up.
    """
    low = to_f16(x.min(keepdims=True))
    step = to_f16((x.max() - low.astype(np.float32)) / np.float32(top))
    lo32, step32 = low.astype(np.float32), step.astype(np.float32)
    q = np.zeros_like(x)
    if step32 > 0:
        q = np.clip(np.floor((x - lo32) / step32 + np.float32(0.5)), 0, top)
    return np.concatenate([low, step]), q.astype(np.uint8)


def put_params(c: Codec, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """f32 [np] scales and zeros -> uint8 [nb_params]."""
    if not c.scale:
        return np.concatenate([to_f16(scale), to_f16(zero)]).astype("<f2").view(np.uint8)
    (s_head, s), (z_head, z) = (_u8_param(x, 255 if c.scale == 1 else 15) for x in (scale, zero))
    head = np.concatenate([s_head, z_head]).astype("<f2").view(np.uint8)
    return np.concatenate([head, s, z] if c.scale == 1 else [head, s | z << 4])


def get_params(c: Codec, params: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [nb_params] -> (scale, zero) f32 [np]."""
    np_ = n_params(c)
    if not c.scale:
        f = params.view("<f2").astype(np.float32)
        return f[:np_], f[np_:]
    s_low, s_step, z_low, z_step = params[:8].view("<f2").astype(np.float32)
    u = params[8:]
    s, z = (x.astype(np.float32) for x in ((u[:np_], u[np_:]) if c.scale == 1 else (u & 15, u >> 4)))
    with np.errstate(invalid="ignore"):
        return s_low + s_step * s, z_low + z_step * z


def per_value(c: Codec, param: np.ndarray) -> np.ndarray:
    """[np] -> [n_cells, head_size]: the parameter that each value uses."""
    if c.role == K:
        return np.repeat(param.reshape(-1, c.head_size), c.group, axis=0)
    return np.repeat(param.reshape(-1, c.n_cells).T, c.group, axis=1)[:, : c.head_size]


def _grouped(c: Codec, x: np.ndarray, fill: float | np.floating) -> np.ndarray:
    """[n_cells, head_size] -> [np, members], value groups padded by `fill`."""
    if c.role == K:
        return x.reshape(-1, c.group, c.head_size).transpose(0, 2, 1).reshape(n_params(c), c.group)
    groups = -(-c.head_size // c.group)
    wide = np.full((c.n_cells, groups * c.group), fill, x.dtype)
    wide[:, : c.head_size] = x
    return wide.reshape(c.n_cells, groups, c.group).transpose(1, 0, 2).reshape(n_params(c), c.group)


# ------------------------------------------------------------------ encode, decode


def encode(
    c: Codec, rows: np.ndarray, valid: np.ndarray | None = None, shared: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """rows f16 [n_cells, head_size], valid uint8 [n_cells/8] -> (codes uint8 [nb_codes], params uint8 [nb_params]).

    shared: codes of another layer, returned as they are; only the parameters come from `rows` (XQuant section 3.3).
    """
    x = rows.astype(np.float32)
    x[~np.isfinite(x)] = 0
    ok = unpack_valid(valid, c.n_cells)[:, None]
    inf = np.float32(np.inf)
    lo = _grouped(c, np.where(ok, x, inf), inf).min(axis=1)
    hi = _grouped(c, np.where(ok, x, -inf), -inf).max(axis=1)
    empty = lo > hi
    lo, hi = np.where(empty, np.float32(0), lo), np.where(empty, np.float32(0), hi)

    eta, n = np.float32(c.eta), np.float32((1 << c.bits) - 1)
    r = np.where(hi > lo, hi - lo, np.float32(0))
    if not c.bits:
        return np.zeros(0, np.uint8), put_params(c, np.zeros_like(r), lo + np.float32(0.5) * r)
    zero = lo + eta * r
    scale = (np.float32(1) - np.float32(2) * eta) * r / n
    params = put_params(c, scale, zero)
    if shared is not None:
        return shared, params

    if c.scale:  # codes are chosen under what is stored
        scale, zero = get_params(c, params)
        r = scale * n / (np.float32(1) - np.float32(2) * eta)
        lo = zero - eta * r
    steps, half = (n + np.float32(1), np.float32(0)) if c.levels else (n, np.float32(0.5))
    mul = np.divide(steps, r, out=np.zeros_like(r), where=r > 0)
    q = np.floor((x - per_value(c, lo)) * per_value(c, mul) + half)
    return pack(c, np.clip(q, 0, n).astype(np.uint8)), params


def exact(c: Codec, codes: np.ndarray, params: np.ndarray) -> np.ndarray:
    """zero + scale * code before rounding to f16: f64 [n_cells, head_size]."""
    scale, zero = get_params(c, params)
    return per_value(c, zero).astype(np.float64) + per_value(c, scale).astype(np.float64) * unpack(c, codes)


def decode(c: Codec, codes: np.ndarray, params: np.ndarray) -> np.ndarray:
    """-> f16 [n_cells, head_size]: zero + scale * code in f32, clamped to the finite range."""
    scale, zero = get_params(c, params)
    with np.errstate(invalid="ignore"):  # inf - inf, 0 * inf: nan, as in C
        return to_f16(per_value(c, zero) + per_value(c, scale) * unpack(c, codes).astype(np.float32))


def match(c: Codec, rows: np.ndarray, mask: int, params: np.ndarray, shared: np.ndarray | None) -> np.ndarray | None:
    """Codes uint8 [nb_codes] under which `params` reproduce rows up to the mantissa bits in `mask`; None when there
    are none.

    Of several such codes of a value the smallest is taken. shared: the only codes tried.
    """
    scale, zero = (per_value(c, p) for p in get_params(c, params))
    keep = np.uint16(~mask & 0xFFFF)
    want = rows.view(np.uint16) & keep

    def reproduces(q: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return (to_f16(zero + scale * q.astype(np.float32)).view(np.uint16) & keep) == want

    if shared is not None:
        return shared if reproduces(unpack(c, shared)).all() else None
    found, codes = np.zeros(rows.shape, bool), np.zeros(rows.shape, np.uint8)
    for q in range(1 << c.bits):
        hit = reproduces(np.full(rows.shape, q)) & ~found
        codes[hit] = q
        found |= hit
    return pack(c, codes) if found.all() else None
