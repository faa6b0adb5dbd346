"""Lattice blocks (HIGGS, arXiv 2411.17525; AQUA-KV section 3): Hadamard rotation, one scale a cell, vectors of d
channels as the index of the nearest of n = 2^(bits*d) points. The definition of every byte.

In f32 and in this order: y = H x (butterflies of growing distance, then one product with 1/sqrt(block); block =
largest power of two that divides the head size), rms = sqrt(sum y^2 / head size) summed in f64 in channel order,
scale = rms (1 and 2 bits) or rms times the best of FACTORS (3 and 4 bits), s = stored scale, index = first point of
least squared distance to y * (1/s), decoded x = H (point * 2^-12 * s). inf and nan count as 0.

codec.group = d. Scales: f16 s[n_cells], or f16 top, u8 u[n_cells] with s = top * (1/65025) * u^2, u = floor(255
sqrt(scale/top) + 1/2), or f16 top, u4 u[n_cells] with 15 and 225 in the place of 255 and 65025, the cell of the lower
number in the lower half of a byte. A cell that holds no data has scale 0. Indices are packed as affine codes are
(affine.py), with vectors in the place of channels and parts {2}, {4}, {4 low, 2 high}, {8}.

Split keys (codec.split): the channels of the slow half of the rotary pairs are such a block of codec.bits, those of the
fast half one of codec.fast_bits behind it; without bits they are zero. Pairs stay together.

Sorted keys (kvq_order): rows take another order of channels and gains before they are encoded, sort_rows(). The
channels where an error costs most (calibrate/order.py) lie in the place of the slow half.
"""

from __future__ import annotations

import functools

import numpy as np

from .codec import SPLIT_NORM, Codec, K, to_f16, unpack_valid
from .lattice_grids import POINTS, STEPS

LANES = 16
PARTS = {2: ((2, 0),), 4: ((4, 0),), 6: ((4, 0), (2, 4)), 8: ((8, 0),)}  # index width -> (width, shift)
UNIT = np.float32(1 / 4096)
#: scales that are tried, as factors of the root mean square; of equals the first is taken
FACTORS = np.array([1, 0.94, 1.07, 0.86, 1.15, 0.78, 1.25, 0.7], np.float32)
SQUARES = 128  # of a table, a side


def grid(c: Codec) -> np.ndarray:
    """Points f32 [n, d]."""
    key = c.group, 1 << (c.bits * c.group)
    return (POINTS[key].astype(np.float32) * np.float32(STEPS[key])) * UNIT


def hadamard(x: np.ndarray) -> np.ndarray:
    """H x along the last axis, f32; H is orthonormal and its own inverse."""
    n = x.shape[-1]
    block, h = n & -n, 1
    x = x.astype(np.float32)
    while h < block:
        y = x.reshape(*x.shape[:-1], n // (2 * h), 2, h)
        x = np.stack([y[..., 0, :] + y[..., 1, :], y[..., 0, :] - y[..., 1, :]], axis=-2).reshape(x.shape)
        h *= 2
    return x * np.float32(1 / np.sqrt(np.float64(block)))


def _lanes_dots(c: Codec) -> tuple[int, int]:
    vectors = c.head_size // c.group
    return (c.n_cells, vectors) if c.role == K else (vectors, c.n_cells)


def _part_shape(c: Codec, width: int) -> tuple[int, int, int, int, int]:
    """[tile, lane, chunk, plane, byte] of a part before its planes are merged."""
    lanes, dots = _lanes_dots(c)
    return -(-lanes // LANES), LANES, -(-dots * width // 32), 8 // width, 4


def halves(c: Codec) -> list[tuple[Codec, np.ndarray]]:
    """The blocks of a codec in their order, each with its channels: one, or the slow half and the fast one."""
    c = c.with_(coords=0)
    if not c.split:
        return [(c, np.arange(c.head_size))]
    half = c.head_size // 2
    by_speed = np.arange(c.head_size)  # fast ones first
    if c.split != SPLIT_NORM:
        by_speed = by_speed.reshape(2, 2, half // 2).transpose(1, 0, 2).reshape(-1)
    own = c.with_(head_size=half, split=0, fast_bits=0)
    fast = [(own.with_(bits=c.fast_bits), by_speed[:half])] if c.fast_bits else []
    return [(own, by_speed[half:]), *fast]


def parts_of(c: Codec, codes: np.ndarray, params: np.ndarray) -> list[tuple[Codec, np.ndarray, np.ndarray, np.ndarray]]:
    """Of each block: codec, channels, codes, params."""
    out, at_codes, at_params = [], 0, 0
    for own, channels in halves(c):
        nb_codes, nb_params = _nbytes(own)
        out.append((own, channels, codes[at_codes : at_codes + nb_codes], params[at_params : at_params + nb_params]))
        at_codes, at_params = at_codes + nb_codes, at_params + nb_params
    return out


def nbytes(c: Codec) -> tuple[int, int]:
    """(nb_codes, nb_params) in bytes."""
    codes, params = zip(*(_nbytes(own) for own, _ in halves(c)))
    return sum(codes), sum(params) + c.coords // 2 * c.n_cells  # basis.py


def _nbytes(c: Codec) -> tuple[int, int]:
    """Of one block."""
    codes = 0
    for width, _ in PARTS[c.bits * c.group]:
        tiles, lanes, chunks, _, k = _part_shape(c, width)
        codes += tiles * chunks * lanes * k
    return codes, 2 * c.n_cells if c.scale == 0 else 2 + c.n_cells // c.scale


def pack(c: Codec, index: np.ndarray) -> np.ndarray:
    """Indices [n_cells, vectors] -> packed bytes uint8 [nb_codes]."""
    by_lane = index if c.role == K else index.T
    out = []
    for width, shift in PARTS[c.bits * c.group]:
        tiles, lanes, chunks, planes, k = _part_shape(c, width)
        full = np.zeros((tiles * lanes, chunks * planes * k), np.int64)
        full[: by_lane.shape[0], : by_lane.shape[1]] = by_lane >> shift & (1 << width) - 1
        x = full.reshape(tiles, lanes, chunks, planes, k).transpose(0, 2, 1, 4, 3)
        out.append((x << np.arange(planes) * width).sum(-1).astype(np.uint8).reshape(-1))
    return np.concatenate(out)


def unpack(c: Codec, codes: np.ndarray) -> np.ndarray:
    """Packed bytes -> indices [n_cells, vectors]."""
    lanes_used, dots_used = _lanes_dots(c)
    out, at = np.zeros((lanes_used, dots_used), np.int64), 0
    for width, shift in PARTS[c.bits * c.group]:
        tiles, lanes, chunks, planes, k = _part_shape(c, width)
        n = tiles * chunks * lanes * k
        x = (
            codes[at : at + n].astype(np.int64).reshape(tiles, chunks, lanes, k, 1) >> np.arange(planes) * width
            & (1 << width) - 1
        )
        full = x.transpose(0, 2, 1, 4, 3).reshape(tiles * lanes, -1)
        out |= full[:lanes_used, :dots_used] << shift
        at += n
    return out if c.role == K else out.T


def _levels(c: Codec) -> int:
    """The largest u of a stored scale."""
    return 255 if c.scale == 1 else 15


def scales(c: Codec, params: np.ndarray) -> np.ndarray:
    """Stored scales, f32 [n_cells]."""
    if c.scale:
        u = params[2:] if c.scale == 1 else np.stack([params[2:] & 15, params[2:] >> 4], 1).reshape(-1)
        u, most = u.astype(np.float32), np.float32(_levels(c))
        s = params[:2].view("<f2").astype(np.float32) * (np.float32(1) / (most * most)) * (u * u)
    else:
        s = params.view("<f2").astype(np.float32)
    return np.where(np.isfinite(s), s, np.float32(0))


@functools.cache
def squares(bits: int) -> np.ndarray:
    """Points f32 [SQUARES, SQUARES, 2] for a trial: of the square of 1/16 a side that holds a vector, from -4 to 4,
    the point nearest to its centre. In whole units of 2^-12; of equals the first point.
    """
    key = 2, 1 << (2 * bits)
    points = POINTS[key].astype(np.int64) * STEPS[key]
    centre = (np.arange(SQUARES) - SQUARES // 2) * 256 + 128
    near = np.empty((SQUARES, SQUARES), np.int64)
    for i, x in enumerate(centre):
        near[i] = ((x - points[:, 0]) ** 2 + (centre[:, None] - points[:, 1]) ** 2).argmin(-1)
    return points[near].astype(np.float32) * UNIT


def best_scales(c: Codec, y: np.ndarray, rms: np.ndarray) -> np.ndarray:
    """The tried scale of least error for every cell, f32 [n_cells]; y: rotated rows, f32.

    error(f) = f^2 * sum over vectors of round(min(1024 |v - p|^2, 2^24 / vectors)), v = y / (f * rms), p the point of
    v's square. What lies outside the table counts to the square at the edge. Sums of whole numbers below 2^24 are
    exact, so they have no order.
    """
    if c.group != 2 or c.bits < 3:
        return rms
    n_vectors = c.head_size // 2
    table, cap = squares(c.bits), np.float32((1 << 24) // n_vectors)
    error = np.empty((len(FACTORS), c.n_cells), np.float32)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        for k, factor in enumerate(FACTORS):
            inv = np.minimum(np.float32(1) / (rms * factor), np.float32(3e38))
            v = (y * inv[:, None]).reshape(c.n_cells, n_vectors, 2)
            at = np.clip(v * np.float32(16) + np.float32(SQUARES // 2), 0, SQUARES - 1).astype(np.int64)
            e = v - table[at[..., 0], at[..., 1]]
            far = (e[..., 0] * e[..., 0] + e[..., 1] * e[..., 1]) * np.float32(1024)
            error[k] = np.rint(np.minimum(far, cap)).sum(-1) * (factor * factor)
    return np.where(rms > 0, rms * FACTORS[error.argmin(0)], np.float32(0))


def pack_scales(c: Codec, scale: np.ndarray) -> np.ndarray:
    """Scales f32 [n_cells] -> parameter bytes."""
    if not c.scale:
        return to_f16(scale).astype("<f2").view(np.uint8)
    top = to_f16(scale.max(keepdims=True))
    t = top.astype(np.float32)
    u = np.zeros_like(scale)
    most = _levels(c)
    if t[0] > 0:
        u = np.floor(np.float32(most) * np.sqrt(scale / t) + np.float32(0.5))
    u = np.clip(u, 0, most).astype(np.uint8)
    return np.concatenate([top.astype("<f2").view(np.uint8), u if c.scale == 1 else u[::2] | u[1::2] << 4])


def _rotate(rows: np.ndarray) -> np.ndarray:
    x = rows.astype(np.float32)
    return hadamard(np.where(np.isfinite(x), x, np.float32(0)))


def sort_rows(rows: np.ndarray, channel: np.ndarray, gain: np.ndarray) -> np.ndarray:
    """Rows of a head f32 [n, head_size] in the order of its block, with gains, f32."""
    return rows.astype(np.float32)[:, channel.astype(np.int64)] * gain.astype(np.float32)


def unsort_rows(rows: np.ndarray, channel: np.ndarray, gain: np.ndarray) -> np.ndarray:
    """Back: what sort_rows() made of it, f32."""
    out = np.empty(rows.shape, np.float32)
    out[:, channel.astype(np.int64)] = rows.astype(np.float32) * (np.float32(1) / gain.astype(np.float32))
    return out


def _indices(c: Codec, y: np.ndarray, params: np.ndarray) -> np.ndarray:
    s, g = scales(c, params), grid(c)
    with np.errstate(divide="ignore", over="ignore"):
        inv = np.where(s > 0, np.minimum(np.float32(1) / s, np.float32(3e38)), np.float32(0))
        v = (y * inv[:, None]).reshape(c.n_cells, -1, c.group)
        dist = np.zeros((c.n_cells, v.shape[1], len(g)), np.float32)
        for j in range(c.group):
            e = v[..., j, None] - g[:, j]
            dist = e * e if j == 0 else dist + e * e
    return dist.argmin(-1)


def encode(
    c: Codec, rows: np.ndarray, valid: np.ndarray | None = None, shared: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """rows f16 [n_cells, head_size] -> (codes, params)."""
    done = [_encode(own, rows[:, channels], valid, shared) for own, channels in halves(c)]
    params = np.concatenate([p for _, p in done])
    return (np.concatenate([codes for codes, _ in done]) if shared is None else shared), params


def _encode(
    c: Codec, rows: np.ndarray, valid: np.ndarray | None, shared: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """One block."""
    y = _rotate(rows)
    total = np.zeros(c.n_cells)
    for i in range(c.head_size):
        total += y[:, i].astype(np.float64) ** 2
    rms = np.where(unpack_valid(valid, c.n_cells), np.sqrt(total / c.head_size).astype(np.float32), np.float32(0))
    params = pack_scales(c, rms if shared is not None else best_scales(c, y, rms))
    return (pack(c, _indices(c, y, params)) if shared is None else shared), params


def rotated(c: Codec, codes: np.ndarray, params: np.ndarray) -> np.ndarray:
    """Decoded rows of one block before the last rotation, f32 [n_cells, head_size]."""
    return (grid(c)[unpack(c, codes)] * scales(c, params)[:, None, None]).reshape(c.n_cells, c.head_size)


def _rows(c: Codec, codes: np.ndarray, params: np.ndarray) -> np.ndarray:
    """f32 [n_cells, head_size], before the rounding to f16."""
    out = np.zeros((c.n_cells, c.head_size), np.float32)
    for own, channels, its_codes, its_params in parts_of(c, codes, params):
        out[:, channels] = hadamard(rotated(own, its_codes, its_params))
    return out


def decode(c: Codec, codes: np.ndarray, params: np.ndarray) -> np.ndarray:
    """-> f16 [n_cells, head_size]."""
    return to_f16(_rows(c, codes, params))


def exact(c: Codec, codes: np.ndarray, params: np.ndarray) -> np.ndarray:
    """-> f64 [n_cells, head_size], without the rounding to f16."""
    return _rows(c, codes, params).astype(np.float64)


def match(c: Codec, rows: np.ndarray, mask: int, params: np.ndarray, shared: np.ndarray | None) -> np.ndarray | None:
    """Codes whose decoded rows equal `rows` but for the bits of `mask`, or None."""
    high = rows.view(np.uint16) & np.uint16(0xFFFF ^ mask)
    codes = shared
    if codes is None:
        blocks = parts_of(c, np.zeros(nbytes(c)[0], np.uint8), params)
        codes = np.concatenate(
            [
                pack(own, _indices(own, _rotate(high.view(np.float16)[:, channels]), its))
                for own, channels, _, its in blocks
            ]
        )
    same = (decode(c, codes, params).view(np.uint16) ^ high) & np.uint16(0xFFFF ^ mask)
    return None if same.any() else codes
