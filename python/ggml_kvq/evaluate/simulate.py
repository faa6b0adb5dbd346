"""Simulation: one of llama.cpp's cache types with an exact window and exact first cells, which llama.cpp has not.

An exact tail alone makes any type better: a type is compared with this package's methods on equal terms only when it
has one too. Upstream's f16 cache decodes each batch; then rows that have left the window, whole pages of 32 cells, are
replaced by what the type makes of them, with upstream's rotation (llama-kv-cache.cpp: Hadamard, heads that are a
multiple of 64). Nothing is saved: bits are what such a cache would take.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt

from ..core.kvstats import UPSTREAM, type_bits
from ..core.model import Model
from ..errors import KvqError

#: Types that the gguf package quantises.
TYPES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
PAGE = 32
Rows = npt.NDArray[np.float32]


def hadamard(n: int) -> Rows:
    """float32 [n, n], orthonormal and symmetric: its own inverse. n is a power of two."""
    h = np.ones((1, 1), np.float32)
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return (h / np.float32(math.sqrt(n))).astype(np.float32)


def rotation_size(head_size: int, value: bool) -> int:
    """Channels that upstream rotates together: 64 of values, of keys as many as divide the head; 0: it does not."""
    if head_size % 64:
        return 0
    n = 64
    while not value and head_size % (2 * n) == 0:
        n *= 2
    return n


def rounded(rows: Rows, kind: str, head_size: int, value: bool) -> Rows:
    """float32 [cells, heads * head_size] as a cache of type `kind` gives them back."""
    n = rotation_size(head_size, value)
    h = hadamard(n) if n else np.ones((1, 1), np.float32)
    x = (rows.reshape(-1, len(h)) @ h).reshape(rows.shape)
    qtype = gguf.GGMLQuantizationType[kind.upper()]
    back: Rows = np.asarray(gguf.quants.dequantize(gguf.quants.quantize(x, qtype), qtype), np.float32)
    return np.reshape(back.reshape(-1, len(h)) @ h, rows.shape)


class Simulated(Model):
    """Upstream's f16 cache whose cells behind `window`, but for the first `sinks`, hold what type `kind` leaves of
    them. KvqError for models with other caches than plain ones.
    """

    def __init__(self, path: Any, kind: str, window: int, sinks: int, **kwargs: Any) -> None:
        self.kind, self.window, self.sinks = kind, window, sinks
        self._n_done = 0  # cells from the start that are as they stay
        super().__init__(path, UPSTREAM, **kwargs)
        arch = self.metadata("general.architecture") or ""
        heads = int(self.metadata(f"{arch}.attention.head_count") or 0)
        width = int(self.metadata(f"{arch}.embedding_length") or 0)
        own = [self.metadata(f"{arch}.attention.{x}_length") for x in ("key", "value")]
        self._head_size = [int(x) if x else width // max(heads, 1) for x in own]
        block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]][0]
        if any(not d or d % block for d in self._head_size):
            self.close()
            raise KvqError(f"{kind} has blocks of {block}, heads here have {self._head_size}: choose another type")

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self._n_done = 0

    def _decode(self, ids: Any, mask: Any) -> npt.NDArray[np.float32]:
        logits = super()._decode(ids, mask)
        first = max(self._n_done, self.sinks)
        end = (len(self._tokens) - self.window) // PAGE * PAGE
        if end > first:
            self._round(first, end)
            self._n_done = end
        return logits

    def _round(self, first: int, end: int) -> None:
        """Cells of positions first .. end - 1 of every layer."""
        lib, ctx = self._libs.llama, self._open()
        size = lib.llama_state_seq_get_size(ctx, 0)
        raw = (ctypes.c_uint8 * size)()
        if lib.llama_state_seq_get_data(ctx, raw, size, 0) != size:
            raise KvqError("llama.cpp gave less of a state than it said; use another model")
        data = np.frombuffer(raw, np.uint8)
        for at, width, value, positions in _tensors(data, len(self._tokens)):
            rows = data[at : at + 2 * width * len(positions)].view(np.float16).reshape(-1, width)
            which = (positions >= first) & (positions < end)
            x = rows[which].astype(np.float32)
            rows[which] = rounded(x, self.kind, self._head_size[value], value).astype(np.float16)
        if lib.llama_state_seq_set_data(ctx, raw, size, 0) != size:
            raise KvqError("llama.cpp did not take a state back; use another model")

    def kv_stats(self) -> dict[str, Any]:
        """As Model.kv_stats, with the bits that such a cache takes: blocks of all cells, window, first cells."""
        stats = super().kv_stats()
        codes = type_bits(self._libs, self.kind)
        bits = codes + 16 * min(1.0, (self.window + self.sinks) / self.n_ctx)
        total = int(stats["bytes_f16"] * bits / 16)
        options = f"{self.kind},window={self.window},sinks={self.sinks}"
        return {**stats, "method": "simulated", "options": options, "bits": bits, "bits_k": bits, "bits_v": bits,
                "bits_no_window": codes, "bytes_total": total}  # fmt: skip


class Part(NamedTuple):
    """f16 rows in a state: first byte, channels, role, and the position of each row's cell."""

    at: int
    width: int
    value: bool
    positions: npt.NDArray[np.int32]


def _tensors(data: npt.NDArray[np.uint8], n_cells: int) -> list[Part]:
    """Tensors of the state of one sequence (llama_kv_cache::state_write, behind a magic number and a version in newer
    ones). A model with sliding windows has a second cache behind the first, of the cells that its window still sees.
    KvqError when it is anything else.
    """

    def number(at: int, kind: type[np.unsignedinteger[Any]] = np.uint32) -> int:
        part = data[at : at + np.dtype(kind).itemsize]
        return int(part.view(kind)[0]) if len(part) == np.dtype(kind).itemsize else -1

    at = next((b for b in (0, 8) if (number(b), number(b + 4)) == (1, n_cells)), len(data) + 1)
    out: list[Part] = []
    plain = True
    while plain and at < len(data):  # a cache: one stream, its cells
        n_here, at = number(at + 4) if number(at) == 1 else 0, at + 8
        cells = data[at : at + 12 * n_here]  # of each: position, one sequence, its number
        plain = 0 < n_here <= n_cells and len(cells) == 12 * n_here
        meta = cells.view(np.int32).reshape(-1, 3) if plain else np.zeros((0, 3), np.int32)
        at += 12 * n_here
        plain, n_layer = plain and number(at) == 0, number(at + 4)  # 0: values are not transposed
        at += 8
        for value in (False, True):
            for _ in range(n_layer if plain else 0):
                nb_row = number(at + 4, np.uint64)
                plain = plain and number(at) == gguf.GGMLQuantizationType.F16
                out.append(Part(at + 12, nb_row // 2, value, meta[:, 0]))
                at += 12 + nb_row * n_here
    if not plain or at != len(data):
        raise KvqError("simulated: works with models of plain KV caches only (no recurrence, no latent attention)")
    return out
