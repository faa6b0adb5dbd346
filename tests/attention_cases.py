"""The cases of test_attention.py, built alike in every process, and the worker that runs them on one instruction set:

KVQ_ISA=avx2 python attention_cases.py OUT.npz
"""

from __future__ import annotations

import itertools
import sys
import zlib
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from ggml_kvq import reference as ref
from ggml_kvq.core import kernels, loader
from ggml_kvq.reference import AFFINE, F16, Codec, K, V

FILL = np.float32(-7.25e8)  # what dst holds before the call, and around it after


@dataclass(frozen=True)
class Case:
    name: str
    dk: int = 64
    dv: int = 64
    n_head_kv: int = 2
    gqa: int = 4
    n_q: int = 1
    n_kv: int = 97
    k_bits: int = 2  # 16: f16, always open
    v_bits: int = 2
    group: int = 32
    u8: int = 0
    levels: int = 0
    page: int = 0  # 0: the smallest that holds the group
    open: str = "last"  # last, none, all, mixed
    mask: str = "causal"  # none, causal, holes, bias, heads, rows, pages, all
    max_bias: float = 0.0
    softcap: float = 0.0
    sinks: bool = False
    slots: str = "identity"  # identity, shuffled
    f32: bool = False
    layout: str = "token"  # token, head: which axis of q and dst is outer
    q_size: float = 0.3

    @property
    def n_head(self) -> int:
        return self.n_head_kv * self.gqa

    @property
    def page_cells(self) -> int:
        return self.page or max(32, self.group)

    def codec(self, role: int) -> Codec:
        bits, d = (self.k_bits, self.dk) if role == K else (self.v_bits, self.dv)
        if bits == 16:
            return Codec(F16, role, 16, 32, 0, 0, 0.0, self.page_cells, d)
        eta = 0.5 / (1 << bits) if self.levels and bits else (0.0, 1 / 6, 0.045, 0.0, 0.0)[bits]
        group = self.group if role == K else min(self.group, d)
        return Codec(AFFINE, role, bits, group, self.u8, self.levels, eta, self.page_cells, d)


def cases() -> list[Case]:
    heads = [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (128, 64), (64, 128), (72, 200)]
    cycle: dict[str, list[Any]] = {
        "n_kv": [33, 64, 31, 129, 65, 160, 1, 96, 257, 127, 32],
        "k_bits": [2, 1, 4, 3, 2, 0, 16],
        "v_bits": [1, 2, 3, 2, 4, 16, 2, 0],
        "group": [32, 32, 64, 16, 128],
        "u8": [0, 1, 0],
        "levels": [0, 0, 1, 0],
        "open": ["last", "none", "mixed", "all", "mixed"],
        "mask": ["causal", "holes", "none", "bias", "pages", "heads", "rows"],
        "max_bias": [0.0, 0.0, 0.0, 8.0],
        "softcap": [0.0, 0.0, 0.0, 0.0, 30.0],
        "sinks": [False, False, True],
        "slots": ["identity", "identity", "shuffled"],
        "f32": [False, False, False, True],
        "layout": ["token", "head"],
        "q_size": [0.3, 0.3, 2.0],
    }
    out = []
    for i, ((dk, dv), gqa, n_q) in enumerate(itertools.product(heads, (1, 4, 8), (1, 2, 7, 32))):
        rng = np.random.default_rng(i)
        picked = {key: values[rng.integers(len(values))] for key, values in cycle.items()}
        out.append(Case(f"sweep {i}", dk, dv, 3 if gqa == 1 else 2, gqa, n_q, **picked))

    base = Case("one")
    for n_kv in (31, 32, 33, 63, 64, 65, 127, 128, 129):
        out.append(replace(base, name=f"n_kv {n_kv}", n_kv=n_kv, dk=128, dv=128, open="mixed"))
    for bits in range(5):
        out.append(
            replace(base, name=f"{bits} bits sealed", k_bits=bits, v_bits=bits, open="none", dk=128, dv=96, n_kv=160)
        )
        out.append(
            replace(
                base,
                name=f"{bits} bits sealed f32",
                k_bits=bits,
                v_bits=bits,
                open="none",
                f32=True,
                u8=1,
                n_q=5,
                n_kv=160,
            )
        )
    for mask in ("none", "holes", "bias", "heads", "rows", "pages", "all"):
        out.append(replace(base, name=f"mask {mask}", mask=mask, n_q=7, n_kv=130, open="mixed"))
        out.append(replace(base, name=f"mask {mask} sinks", mask=mask, n_q=7, n_kv=130, sinks=True, slots="shuffled"))
    out += [
        replace(base, name="16 query heads a KV head", gqa=16, n_q=3),
        replace(
            base, name="3 query heads a KV head", gqa=3, n_q=6, n_head_kv=4, max_bias=8.0, softcap=20.0, mask="bias"
        ),
        replace(base, name="odd rows", gqa=5, n_q=11, n_kv=200, n_head_kv=1),
        replace(base, name="512 tokens", gqa=2, n_head_kv=1, n_q=512, n_kv=520, open="mixed"),
        replace(base, name="512 tokens f32", gqa=1, n_head_kv=2, n_q=512, n_kv=545, dk=96, dv=80, f32=True),
        replace(
            base, name="512 tokens open", gqa=1, n_head_kv=1, n_q=512, n_kv=512, k_bits=16, v_bits=16, mask="holes"
        ),
        replace(base, name="split", n_kv=2049, gqa=4, n_head_kv=1),
        replace(
            base,
            name="split over groups of 128",
            n_kv=4100,
            gqa=1,
            n_head_kv=2,
            group=128,
            open="mixed",
            dk=128,
            dv=128,
        ),
        replace(
            base,
            name="split with sinks and holes",
            n_kv=1500,
            n_q=2,
            mask="pages",
            sinks=True,
            max_bias=4.0,
            slots="shuffled",
        ),
        replace(base, name="split of all-masked rows", n_kv=1200, n_q=3, mask="all", n_head_kv=1),
        replace(base, name="sharp softmax", q_size=6.0, n_kv=300, f32=True, n_q=3),
        replace(base, name="sharp softmax int8", q_size=6.0, n_kv=300, n_q=3, k_bits=4, v_bits=4),
        replace(base, name="page of 256", page=256, group=64, n_kv=600, n_q=2, dk=72, dv=72),
        replace(base, name="value group is the head", dk=72, dv=72, group=128, n_kv=300, open="none"),
        replace(base, name="head of 8", dk=8, dv=8, k_bits=4, v_bits=4, n_kv=70),
        replace(
            base, name="head of 1024", dk=1024, dv=1024, n_head_kv=1, gqa=1, n_kv=70, open="mixed", k_bits=3, v_bits=3
        ),
        replace(base, name="few cells used", n_kv=1, open="all", k_bits=16, v_bits=16),
    ]
    assert len({c.name for c in out}) == len(out)
    return out


@dataclass
class Built:
    """A case as data. slots: cell of every slot, -1 none, pages one after the other; k, v: exact decoded values by
    slot;
    lanes: per role the pages read as int8, (first slot, scale, zero, code), each [n_head_kv, n_cells, d]."""

    case: Case
    q: np.ndarray
    mask: np.ndarray | None
    sinks: np.ndarray | None
    pages: list[kernels.Page]
    cells: np.ndarray
    k: np.ndarray
    v: np.ndarray
    lanes: dict[int, list] = field(default_factory=lambda: {K: [], V: []})

    def slot_mask(self) -> np.ndarray:
        """f64 [n_q, 1 or n_head, slots]; -inf where a slot holds nothing or a cell at or beyond n_kv."""
        c = self.case
        at = np.clip(self.cells, 0, c.n_kv - 1)
        m = np.zeros((c.n_q, 1, at.size)) if self.mask is None else self.mask.astype(np.float64)[:, :, at]
        return np.where((self.cells < 0) | (self.cells >= c.n_kv), -np.inf, m)

    def stream(self, buffer: np.ndarray) -> kernels.Stream:
        c = self.case
        return kernels.Stream(
            c.codec(K), c.codec(V), c.n_head_kv, c.n_kv, self.pages, strided(c, self.q), dst_view(c, buffer),
            float(np.float32(1 / np.sqrt(c.dk))), self.mask, c.max_bias, c.softcap, self.sinks,
            kernels.F32 if c.f32 else 0,
        )  # fmt: skip


def strided(c: Case, q: np.ndarray) -> np.ndarray:
    """q with head and token axes in the case's order and gaps after each row."""
    wide = np.full(q.shape[:2][:: 1 if c.layout == "token" else -1] + (c.dk + 3,), np.nan, np.float32)
    view = (wide if c.layout == "token" else wide.transpose(1, 0, 2))[:, :, : c.dk]
    view[:] = q
    return view


def dst_buffer(c: Case) -> np.ndarray:
    return np.full(64 + c.n_q * c.n_head * (c.dv + 5) + 64, FILL, np.float32)


def dst_view(c: Case, buffer: np.ndarray) -> np.ndarray:
    outer, inner = (c.n_q, c.n_head) if c.layout == "token" else (c.n_head, c.n_q)
    view = buffer[64 : 64 + outer * inner * (c.dv + 5)].reshape(outer, inner, c.dv + 5)[:, :, : c.dv]
    return view if c.layout == "token" else view.transpose(1, 0, 2)


def make_mask(c: Case, rng: Any, n_pages: int) -> np.ndarray | None:
    n, inf = c.n_kv, np.float16(-np.inf)
    shape = (c.n_q, c.n_head if c.mask == "heads" else 1, n)
    if c.mask == "none":
        return None
    m = np.zeros(shape, np.float16)
    if c.mask in ("bias", "heads") or c.max_bias:
        m = (-rng.uniform(0, 4, shape)).astype(np.float16)
    if c.mask in ("causal", "bias"):
        last = n - c.n_q + np.arange(c.n_q)[:, None, None]
        m = np.where(np.arange(n)[None, None] > np.maximum(last, 0), inf, m)
    if c.mask in ("holes", "heads", "rows"):
        m = np.where(rng.random(shape) < 0.5, inf, m)
    if c.mask == "rows":
        m[rng.random(c.n_q) < 0.6] = inf
        m[0] = inf
    if c.mask == "pages":
        page = np.arange(n) // c.page_cells
        m = np.where(np.isin(page, rng.choice(n_pages, (n_pages + 1) // 2, replace=False))[None, None], inf, m)
    if c.mask == "all":
        m[:] = inf
    return np.ascontiguousarray(m)


@cache
def build(c: Case) -> Built:
    lib = loader.libraries().need_kvq()
    rng = np.random.default_rng(zlib.crc32(c.name.encode()))
    n_pages = -(-c.n_kv // c.page_cells)
    n = n_pages * c.page_cells
    cells = np.arange(n, dtype=np.int32)
    if c.slots == "shuffled":
        cells = rng.permutation(cells).astype(np.int32)
        cells[rng.random(n) < 0.2] = -1
    b = Built(
        c,
        (c.q_size * rng.normal(size=(c.n_q, c.n_head, c.dk))).astype(np.float32),
        make_mask(c, rng, n_pages),
        (2 * rng.normal(size=c.n_head)).astype(np.float32) if c.sinks else None,
        [],
        cells,
        np.zeros((c.n_head_kv, n, c.dk)),
        np.zeros((c.n_head_kv, n, c.dv)),
    )
    for p in range(n_pages):
        at = slice(p * c.page_cells, (p + 1) * c.page_cells)
        lanes: dict[int, Any] = {}
        for role, values, d in ((K, b.k, c.dk), (V, b.v, c.dv)):
            codec = c.codec(role)
            spread = np.exp(0.5 * rng.normal(size=d)) if role == K else 1.0  # key channels differ in size
            rows = ((rng.normal(size=(c.n_head_kv, c.page_cells, d)) + 0.5) * spread).astype(np.float16)
            is_open = codec.type == F16 or {
                "last": p == n_pages - 1, "none": False, "all": True, "mixed": rng.random() < 0.5,
            }[c.open]  # fmt: skip
            if is_open:
                tile = np.zeros((c.n_head_kv, c.page_cells, -(-d // 16) * 16), np.float16)
                tile[:, :, :d] = rows
                values[:, at], lanes[role] = rows, tile
                continue
            blocks = [kernels.encode(lib, codec, head) for head in rows]
            lanes[role] = tuple(np.stack(x) for x in zip(*blocks))
            exact = ref.affine.decode if c.f32 else ref.affine.exact  # the f32 path reads rows that decode() rounded
            values[:, at] = [exact(codec, *block) for block in blocks]
            if not c.f32:
                params = [ref.affine.get_params(codec, block[1]) for block in blocks]
                scale, zero = (np.stack([ref.affine.per_value(codec, pair[i]) for pair in params]) for i in (0, 1))
                b.lanes[role].append(
                    (at.start, scale, zero, np.stack([ref.affine.unpack(codec, block[0]) for block in blocks]))
                )
        slots = np.ascontiguousarray(cells[at]) if c.slots == "shuffled" else None
        b.pages.append(kernels.Page(lanes[K], lanes[V], c.page_cells, at.start, slots))
        if p % 3 == 1:  # a page that was never written
            b.pages.append(kernels.Page(None, None, 0, 0))
    return b


def main(path: str) -> None:
    lib = loader.libraries().need_kvq()
    out = {"kernel": np.array(lib.kvq_kernel_name().decode())}
    everything = []
    for i, case in enumerate(cases()):
        for n_threads in (1, 2):
            buffer = dst_buffer(case)
            kernels.attend(lib, [build(case).stream(buffer)], n_threads)
            out[f"{i} {n_threads}"] = buffer
        everything.append(dst_buffer(case))
    for n_threads in (1, 2):  # all cases as streams of one call
        kernels.attend(lib, [build(case).stream(buffer) for case, buffer in zip(cases(), everything)], n_threads)
        for i, buffer in enumerate(everything):
            out[f"{i} all {n_threads}"] = buffer.copy()
    arrays: dict[str, Any] = out
    np.savez(path, **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
