"""encode, decode, image and attend of libggml-kvq on numpy arrays; ggml_kvq.reference defines what they compute.

`lib` is the library as loader.libraries().need_kvq() returns it. Every function raises MethodError for what the
library refuses.
"""

from __future__ import annotations

from ctypes import CDLL, POINTER, byref, c_float, c_int32, c_size_t, c_uint8, c_uint16, c_uint64, c_void_p, pointer
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import processes
from ..reference import Codec
from ..reference.specache import FAR_FORMATS, FETCHES, far_row_bytes
from . import native

F32 = 1  # KVQ_ATTN_F32


def c_codec(c: Codec) -> native.kvq_codec:
    """The C structure of a Codec."""
    return native.kvq_codec(
        c.type,
        c.role,
        c.bits,
        c.group,
        c.scale,
        c.levels,
        c.eta,
        c.n_cells,
        c.head_size,
        c.hi,
        c.n_hi,
        c.split,
        c.fast_bits,
        c.coords,
    )


def _compute(lib: CDLL, call: Any, n_threads: int) -> None:
    """MethodError for what `call`, a function of the library, refuses. Several threads: see processes.compute."""

    def checked() -> None:
        native.check(lib, call())  # the reason is kept in the thread that called

    if n_threads > 1:
        processes.compute(checked)
    else:
        checked()


def _at(array: np.ndarray | None, ctype: Any = c_void_p) -> Any:
    if array is None:
        return None
    return array.ctypes.data_as(ctype if ctype is c_void_p else POINTER(ctype))


def _u8(array: np.ndarray | None) -> np.ndarray | None:
    return None if array is None else np.ascontiguousarray(array, np.uint8)


def _rows(c: Codec, rows: np.ndarray) -> np.ndarray:
    rows = np.ascontiguousarray(rows)
    if rows.itemsize != 2 or rows.shape != (c.n_cells, c.head_size):
        raise ValueError(f"rows have shape {rows.shape} of {rows.dtype}, not f16 {(c.n_cells, c.head_size)}")
    return rows.view(np.uint16)


def nbytes(lib: CDLL, c: Codec) -> tuple[int, int]:
    """(nb_codes, nb_params) of a block (kvq_codec_bytes)."""
    codes, params = c_size_t(), c_size_t()
    native.check(lib, lib.kvq_codec_bytes(byref(c_codec(c)), byref(codes), byref(params)))
    return codes.value, params.value


def encode(
    lib: CDLL, c: Codec, rows: np.ndarray, valid: np.ndarray | None = None, shared: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """rows f16 [n_cells, head_size], valid uint8 [n_cells/8], shared uint8 [nb_codes] -> (codes, params)
    (kvq_encode).
    """
    nb_codes, nb_params = nbytes(lib, c)
    codes, params = (np.full(nb_codes, 0xA5, np.uint8), np.full(nb_params, 0xA5, np.uint8))
    rows, valid, shared = _rows(c, rows), _u8(valid), _u8(shared)
    status = lib.kvq_encode(
        byref(c_codec(c)), _at(rows, c_uint16), _at(valid, c_uint8), _at(shared), _at(codes), _at(params)
    )
    native.check(lib, status)
    return (codes if shared is None else shared), params


def decode(lib: CDLL, c: Codec, codes: np.ndarray, params: np.ndarray) -> np.ndarray:
    """-> f16 [n_cells, head_size] (kvq_decode)."""
    rows = np.full((c.n_cells, c.head_size), 0xA5A5, np.uint16)
    native.check(lib, lib.kvq_decode(byref(c_codec(c)), _at(_u8(codes)), _at(_u8(params)), _at(rows, c_uint16)))
    return rows.view(np.float16)


def round_trip(lib: CDLL, c: Codec, rows: np.ndarray, n_threads: int = 1) -> np.ndarray:
    """f32 [n, heads * head_size] -> what encoded pages of n_cells rows give back, f32 (kvq_round_trip)."""
    out = np.array(rows, np.float32, order="C")
    n_head, at = out.shape[1] // c.head_size, _at(out, c_float)
    _compute(lib, lambda: lib.kvq_round_trip(byref(c_codec(c)), n_head, len(out), at, n_threads), n_threads)
    return out


@dataclass(frozen=True)
class Weights:
    """A predictor as kernels read it (kvq_weights_pack)."""

    n_in: int
    n_out: int
    bits: int
    data: np.ndarray


def pack_weights(lib: CDLL, w: np.ndarray, bits: int) -> Weights:
    """w f32 [n_out, n_in]; bits 8 or 4."""
    w = np.ascontiguousarray(w, np.float32)
    n_out, n_in = w.shape
    data = np.zeros(lib.kvq_weights_bytes(n_in, n_out, bits), np.uint8)
    native.check(lib, lib.kvq_weights_pack(n_in, n_out, bits, _at(w, c_float), _at(data)))
    return Weights(n_in, n_out, bits, data)


def predict(lib: CDLL, w: Weights, rows: np.ndarray, add: np.ndarray | None = None, n_threads: int = 1) -> np.ndarray:
    """W rows + add, f32 [n, n_out]; rows f32 [n, n_in], add f32 [n, n_out] (kvq_predict)."""
    rows = np.ascontiguousarray(rows, np.float32)
    add = None if add is None else np.ascontiguousarray(add, np.float32)
    if rows.shape[1:] != (w.n_in,) or (add is not None and add.shape != (len(rows), w.n_out)):
        raise ValueError(f"rows have shape {rows.shape}, the predictor takes {w.n_in} inputs and gives {w.n_out}")
    out = np.empty((len(rows), w.n_out), np.float32)
    at = _at(w.data), len(rows), _at(rows, c_float), _at(add, c_float), _at(out, c_float)
    _compute(lib, lambda: lib.kvq_predict(w.n_in, w.n_out, w.bits, *at, n_threads), n_threads)
    return out


def image(lib: CDLL, c: Codec, codes: np.ndarray, params: np.ndarray) -> np.ndarray:
    """-> uint16 [n_cells, head_size], the saved-state image (kvq_image)."""
    rows = np.full((c.n_cells, c.head_size), 0xA5A5, np.uint16)
    native.check(lib, lib.kvq_image(byref(c_codec(c)), _at(_u8(codes)), _at(_u8(params)), _at(rows, c_uint16)))
    return rows


def image_match(
    lib: CDLL, c: Codec, rows: np.ndarray, shared: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray] | None:
    """uint16 [n_cells, head_size] -> (codes, params), None when it is no image (kvq_image_match)."""
    nb_codes, nb_params = nbytes(lib, c)
    codes, params = (np.full(nb_codes, 0xA5, np.uint8), np.full(nb_params, 0xA5, np.uint8))
    rows, shared = _rows(c, rows), _u8(shared)
    found = lib.kvq_image_match(byref(c_codec(c)), _at(rows, c_uint16), _at(shared), _at(codes), _at(params))
    return ((codes if shared is None else shared), params) if found else None


@dataclass
class Page:
    """A page of all KV heads of a stream. A lane is (codes uint8 [n_head_kv, nb_codes], params uint8 [n_head_kv,
    nb_params]) when sealed, or an open f16 tile [n_head_kv, n_slots, head size padded to 16].

    cell: of slot 0; slots: slot -> cell, -1 for none, int32 [n_slots], or None for cell + slot.
    """

    k: Any
    v: Any
    n_slots: int
    cell: int = 0
    slots: np.ndarray | None = None


@dataclass
class Far:
    """The second tier of a stream (kvq_far). rows: of every page of the stream, keys and values, uint8 [n_head_kv,
    n_cells, far_row_bytes], None where a page has none; kept int32 [n_head_kv, n_kept], read and written by
    fetch=ahead; counts uint64 [4], added to.
    """

    fetch: str
    top: int
    form: str
    n_cells: int
    rows: list[tuple[np.ndarray | None, np.ndarray | None]]
    kept: np.ndarray | None = None
    counts: np.ndarray | None = None

    def struct(self) -> tuple[native.kvq_far, list[Any]]:
        """And what must outlive it."""
        tables = [(c_void_p * max(len(self.rows), 1))(*[_at(r[v]) for r in self.rows]) for v in (0, 1)]
        out = native.kvq_far(
            FETCHES.index(self.fetch), self.top, FAR_FORMATS.index(self.form), self.n_cells, tables[0], tables[1]
        )
        out.kept, out.counts = _at(self.kept, c_int32), _at(self.counts, c_uint64)
        out.n_kept = 0 if self.kept is None else self.kept.shape[1]
        return out, [tables, self]


@dataclass
class Stream:
    """One softmax problem. q f32 [n_q, n_head, head_size_k] and dst f32 [n_q, n_head, head_size_v], last axis
    contiguous, others free; mask f16 [n_q, 1 or n_head, n_kv] or None; sinks f32 [n_head] or None. dst is written.
    """

    k: Codec
    v: Codec
    n_head_kv: int
    n_kv: int
    pages: list[Page]
    q: np.ndarray
    dst: np.ndarray
    scale: float
    mask: np.ndarray | None = None
    max_bias: float = 0.0
    softcap: float = 0.0
    sinks: np.ndarray | None = None
    flags: int = 0
    far: Far | None = None


def far_encode(lib: CDLL, form: str, rows: np.ndarray) -> np.ndarray:
    """rows f16 [n, head_size] -> uint8 [n, far_row_bytes] (kvq_far_encode)."""
    rows = np.ascontiguousarray(rows, np.float16)
    out = np.full((len(rows), far_row_bytes(form, rows.shape[1])), 0xA5, np.uint8)
    native.check(lib, lib.kvq_far_encode(FAR_FORMATS.index(form), rows.shape[1], len(rows), _at(rows), _at(out)))
    return out


def far_decode(lib: CDLL, form: str, far: np.ndarray, head_size: int) -> np.ndarray:
    """uint8 [n, far_row_bytes] -> f16 [n, head_size] (kvq_far_decode)."""
    far = np.ascontiguousarray(far, np.uint8)
    if far.shape[1:] != (far_row_bytes(form, head_size),):
        raise ValueError(f"far rows have shape {far.shape}, {form} takes {far_row_bytes(form, head_size)} bytes a row")
    out = np.full((len(far), head_size), 0xA5A5, np.uint16)
    native.check(lib, lib.kvq_far_decode(FAR_FORMATS.index(form), head_size, len(far), _at(far), _at(out)))
    return out.view(np.float16)


def _strides(x: np.ndarray) -> tuple[int, int]:
    if x.strides[-1] != x.itemsize:
        raise ValueError(
            f"the last axis has stride {x.strides[-1]} bytes instead of {x.itemsize}: pass a contiguous one"
        )
    return x.strides[0] // x.itemsize, 0 if x.shape[1] == 1 else x.strides[1] // x.itemsize


def _structs(
    streams: list[Stream],
    means: Any,
    rotary: Any,
    positions: Any,
    lse: np.ndarray | None,
    sealed: Any = None,
    order: tuple[np.ndarray, np.ndarray] | None = None,
    bases: tuple[Any, Any] = (None, None),
) -> tuple[Any, list[Any]]:
    """kvq_attn of every stream, and what must outlive them."""
    structs = (native.kvq_attn * len(streams))()
    keep: list[Any] = []
    for a, s in zip(structs, streams):
        pages = (native.kvq_page * max(len(s.pages), 1))()
        for to, page in zip(pages, s.pages):
            for name, lane in (("k", page.k), ("v", page.v)):
                codes, params = lane if isinstance(lane, tuple) else (lane, None)
                keep += [codes, params]
                setattr(to, f"{name}_codes", None if codes is None else codes.ctypes.data)
                setattr(to, f"{name}_params", None if params is None else params.ctypes.data)
            to.cell, to.n_slots = page.cell, page.n_slots
            to.map = _at(page.slots, c_int32)
        a.k, a.v = c_codec(s.k), c_codec(s.v)
        a.n_q, a.n_head, a.n_head_kv = s.q.shape[0], s.q.shape[1], s.n_head_kv
        a.n_pages, a.n_kv, a.flags = len(s.pages), s.n_kv, s.flags
        a.scale, a.max_bias, a.softcap = s.scale, s.max_bias, s.softcap
        a.q, (a.q_stride_token, a.q_stride_head) = _at(s.q, c_float), _strides(s.q)
        a.dst, (a.dst_stride_token, a.dst_stride_head) = (_at(s.dst, c_float), _strides(s.dst))
        if s.mask is not None:
            a.mask, (a.mask_stride_token, a.mask_stride_head) = (_at(s.mask, c_uint16), _strides(s.mask))
        if means is not None:  # f32 [n_head_kv, head size] of keys and of values
            a.k_mean, a.v_mean = (_at(x, c_float) for x in means)
        if rotary is not None:  # native.kvq_rotary and int32 positions [n cells]
            a.rotary, a.positions, a.sealed = pointer(rotary), _at(positions, c_int32), _at(sealed, c_int32)
        if order is not None:
            channel, gain = np.ascontiguousarray(order[0], np.uint16), np.ascontiguousarray(order[1], np.float32)
            back = np.float32(1) / gain
            held = native.kvq_order(_at(channel, c_uint16), _at(gain, c_float), _at(back, c_float))
            a.k_order = pointer(held)
            keep += [channel, gain, back, held]
        a.k_basis, a.v_basis = bases
        a.sinks, a.pages, a.lse = _at(s.sinks, c_float), pages, _at(lse, c_float)
        if s.far is not None:
            far, rows = s.far.struct()
            a.far = pointer(far)
            keep += [far, *rows]
        keep += [pages, s]
    return structs, keep


def attend(
    lib: CDLL,
    streams: list[Stream],
    n_threads: int = 1,
    *,
    means: Any = None,
    rotary: Any = None,
    positions: np.ndarray | None = None,
    lse: np.ndarray | None = None,
    sealed: np.ndarray | None = None,
    order: tuple[np.ndarray, np.ndarray] | None = None,
    bases: tuple[Any, Any] = (None, None),
) -> None:
    """Fill dst of every stream, and lse f32 [n_q, n_head] of a single one (kvq_attend). order: channels and gains of
    sorted keys, [n_head_kv, head size] each (kvq_order). bases: of keys and values (kvq_basis_new)."""
    structs, _keep = _structs(streams, means, rotary, positions, lse, sealed, order, bases)
    _compute(lib, lambda: lib.kvq_attend(structs, len(streams), n_threads), n_threads)


def column_sums(
    lib: CDLL, stream: Stream, lse: np.ndarray, rows: np.ndarray | None = None, n_threads: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Attention probabilities of query tokens `rows` (int32, None: all) summed by slot (kvq_column_sums).

    lse: as attend() left it. Returns (sums f32, seen int32), both [n_head_kv, slots of all pages].
    """
    structs, keep = _structs([stream], None, None, None, lse)
    n_slots = sum(p.n_slots for p in stream.pages)
    sums, seen = np.zeros((stream.n_head_kv, n_slots), np.float32), np.zeros((stream.n_head_kv, n_slots), np.int32)
    n_rows = 0 if rows is None else len(rows)
    at = _at(rows, c_int32), n_rows, _at(sums, c_float), _at(seen, c_int32)
    _compute(lib, lambda: lib.kvq_column_sums(structs, *at, n_threads), n_threads)
    del keep
    return sums, seen


__all__ = [
    "F32",
    "Far",
    "Page",
    "Stream",
    "attend",
    "c_codec",
    "column_sums",
    "decode",
    "encode",
    "far_decode",
    "far_encode",
    "image",
    "image_match",
    "nbytes",
]
