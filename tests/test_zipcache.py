"""ZipCache: mixed blocks, column sums, probes, the choice of salient cells, and the method in a model (ZipCache,
arXiv 2405.14256, section 4).
"""

from __future__ import annotations

from ctypes import CDLL, POINTER, c_int32, c_uint8, c_uint16, c_void_p
from dataclasses import replace
from typing import Any

import attention_cases as ac
import numpy as np
import pytest
from ggml_kvq import reference as ref
from ggml_kvq.core import kernels, loader, native
from ggml_kvq.reference import AFFINE, MIXED, Codec, K, V, affine, attention, mixed, saliency


@pytest.fixture(scope="module")
def lib() -> Any:
    return loader.libraries().need_kvq()


def codec(
    role: int, n_hi: int = 96, page: int = 160, d: int = 64, scale: int = 1, hi: int = 4, lo: int = 2, eta: float = 0.0
) -> Any:
    return Codec(MIXED, role, lo, page if role == K else d, scale, 0, eta, page, d, hi, n_hi)


CODECS = [
    codec(role, n_hi, page, d, scale, hi, lo, eta)
    for role in (K, V)
    for n_hi, page, d, scale, hi, lo, eta in (
        (96, 160, 64, 1, 4, 2, 0.0),
        (0, 160, 64, 1, 4, 2, 0.0),
        (160, 160, 64, 1, 4, 2, 0.0),
        (64, 96, 128, 0, 3, 1, 0.1),
        (32, 256, 80, 0, 4, 2, 0.045),
        (32, 64, 256, 1, 2, 4, 0.0),
        (96, 160, 64, 2, 4, 2, 0.0),
        (64, 128, 128, 2, 4, 2, 0.1),
    )
]


def native_encode(lib: CDLL, c: Any, rows: Any, valid: Any, salient: Any) -> Any:
    """kvq_encode with the set where encode expects it."""
    nb_codes, nb_params = kernels.nbytes(lib, c)
    codes, params = np.full(nb_codes, 0xA5, np.uint8), np.full(nb_params, 0xA5, np.uint8)
    if salient is not None:
        params[: c.n_cells // 8] = np.packbits(salient, bitorder="little")
    u8 = POINTER(c_uint8)
    native.check(
        lib,
        lib.kvq_encode(
            kernels.c_codec(c),
            np.ascontiguousarray(rows).view(np.uint16).ctypes.data_as(POINTER(c_uint16)),
            None if valid is None else valid.ctypes.data_as(u8),
            None,
            codes.ctypes.data_as(c_void_p),
            params.ctypes.data_as(c_void_p),
        ),
    )
    return codes, params


def draw(c: Any, rng: Any, kind: Any) -> Any:
    rows = rng.normal(size=(c.n_cells, c.head_size))
    if kind == "outliers":
        rows *= np.exp(2 * rng.normal(size=c.head_size))
    rows = rows.astype(np.float16)
    if kind == "odd":
        rows[rng.random(rows.shape) < 0.05] = np.nan
        rows[rng.random(rows.shape) < 0.05] = np.inf
        rows[:, 3] = 0
        rows[:, 5] = np.float16(6e-8)
    return rows


@pytest.mark.parametrize("kind", ["normal", "outliers", "odd"])
@pytest.mark.parametrize("c", CODECS, ids=str)
def test_block_equals_definition(lib: CDLL, c: Any, kind: Any) -> None:
    rng = np.random.default_rng(len(kind) + c.n_hi + c.role)
    for with_set, with_valid in ((True, False), (True, True), (False, False)):
        rows = draw(c, rng, kind)
        salient = np.isin(np.arange(c.n_cells), rng.choice(c.n_cells, c.n_hi, replace=False)) if with_set else None
        valid = rng.integers(0, 256, c.n_cells // 8, np.uint8) if with_valid else None
        want_codes, want_params = mixed.encode(c, rows, valid, salient=salient)
        codes, params = native_encode(
            lib, c, rows, valid, salient if with_set else np.ones(c.n_cells, bool)[: c.n_cells - 1]
        )
        assert ref.nbytes(c) == kernels.nbytes(lib, c) == (codes.size, params.size)
        assert np.array_equal(params, want_params) and np.array_equal(codes, want_codes)
        decoded = ref.decode(c, codes, params)
        assert np.array_equal(kernels.decode(lib, c, codes, params).view(np.uint16), decoded.view(np.uint16))
        image = kernels.image(lib, c, codes, params)
        assert np.array_equal(image, ref.image.write(c, codes, params))
        back = kernels.image_match(lib, c, image)
        again = ref.image.read(c, image)
        assert back is not None and again is not None
        assert np.array_equal(back[1], params) and np.array_equal(back[0], again[0])
        assert np.array_equal(kernels.image(lib, c, *back), image)


def test_all_or_none_salient_is_one_plain_block(lib: CDLL) -> None:
    """All salient = the 4-bit block of the page, none = the 2-bit block, byte for byte behind the set (and the
    channels of values).
    """
    rng = np.random.default_rng(1)
    for role, n_hi, bits in ((K, 160, 4), (K, 0, 2), (V, 160, 4), (V, 0, 2)):
        c = codec(role, n_hi)
        rows = draw(c, rng, "outliers")
        codes, params = native_encode(lib, c, rows, None, np.arange(160) < n_hi)
        plain = Codec(AFFINE, role, bits, 160 if role == K else 64, 1, 0, 0.0, 160, 64)
        if role == V:
            top = np.sqrt(np.abs(rows.astype(np.float32)).max(axis=0)).astype(np.float16)
            top = (top.view(np.uint16) + np.uint16(64) & np.uint16(0xFF80)).view(np.float16)  # three mantissa bits
            rows = (rows.astype(np.float32) / top.astype(np.float32)).astype(np.float16)
        want = kernels.encode(lib, plain, rows)
        assert np.array_equal(codes, want[0]) and np.array_equal(params[-want[1].size :], want[1])


def test_channel_separable_values() -> None:
    """With outlier channels the error is below the token-wise one; with equal ranges it is the same."""
    rng = np.random.default_rng(2)
    errors = {}
    for kind in ("outliers", "equal"):
        c = codec(V, 0, scale=0)
        rows = draw(c, rng, "outliers" if kind == "outliers" else "normal")
        if kind == "equal":
            rows[0] = np.float16(4)  # every channel has the same largest value
            rows = np.clip(rows, -4, 4)
        plain = Codec(AFFINE, V, 2, 64, 0, 0, 0.0, 160, 64)
        x = rows.astype(np.float64)
        scale = np.abs(x).max(axis=0)
        errors[kind] = [
            np.mean(((t.decode(k, *t.encode(k, rows)).astype(np.float64) - x) / scale) ** 2)
            for t, k in ((mixed, c), (affine, plain))
        ]
    assert errors["outliers"][0] < 0.7 * errors["outliers"][1]
    assert errors["equal"][0] == pytest.approx(errors["equal"][1], rel=0.02)


@pytest.mark.parametrize(("heads", "d", "limit"), [(4, 64, 3.6), (8, 128, 3.55)])
def test_true_bits_at_16k(lib: CDLL, heads: int, d: int, limit: Any) -> None:
    """Allocated bits; a page in its f16 frame has no packed block besides, and at 4k that page is what remains
    (docs/methods/zipcache.md).
    """
    got = {n: native.plan(lib, "zipcache", "", [(il, heads, d, d) for il in range(8)], n) for n in (4096, 16384)}
    assert got[16384]["bits"] <= limit and got[4096]["bits"] <= 4.0
    values = got[4096]["bytes_f16"] // 2
    pages = 8 * got[4096]["bytes_codes"] / (values * (0.6 * 4 + 0.4 * 2)) * 4096 / 160
    assert pages == 25, "26 pages, one of them in its frame"


# ---------------------------------------------------------------- column sums


def attend_with_lse(lib: CDLL, built: Any, n_threads: Any) -> Any:
    """lse [n_q, n_head], sums and seen [n_head_kv, slots] of all rows and of a few."""
    c = built.case
    stream = built.stream(ac.dst_buffer(c))
    kernels.attend(lib, [stream], n_threads, lse=(lse := np.full((c.n_q, c.n_head), 7, np.float32)))
    few = np.arange(0, c.n_q, 3, dtype=np.int32)
    out = [kernels.column_sums(lib, stream, lse, rows, n_threads) for rows in (None, few)]
    return lse, few, out


SUMS = [c for i, c in enumerate(ac.cases()) if i % 4 == 0 and c.n_kv < 600] + [
    replace(ac.Case("sums of 70 rows"), n_q=70, n_kv=200, open="mixed"),
    replace(ac.Case("sums of 100 rows, open"), n_q=100, n_kv=160, open="all", dk=128, gqa=2),
]


@pytest.mark.parametrize("case", SUMS, ids=lambda c: c.name)
def test_column_sums_equal_an_explicit_softmax(lib: CDLL, case: Any) -> None:
    case = replace(case, f32=True)  # values that decode() rounds, as the f64 weights
    built = ac.build(case)
    x = attention.logits(built.q, built.k, built.slot_mask(), 1 / np.sqrt(case.dk), case.max_bias, case.softcap)
    weights = attention.weights(x, built.sinks)
    visible = np.broadcast_to(~np.isneginf(built.slot_mask()), x.shape)
    for n_threads in (1, 2):
        _, few, results = attend_with_lse(lib, built, n_threads)
        for rows, (sums, seen) in zip((None, few), results, strict=True):
            want = saliency.column_sums(weights, case.n_head_kv, rows)
            assert np.abs(sums - want).max() < 2e-4 * max(1, case.n_q), case.name
            count = visible if rows is None else visible[rows]
            per_head = count[:, :: case.gqa] if count.shape[1] == case.n_head else count
            assert np.array_equal(seen, np.broadcast_to(per_head.sum(axis=0), seen.shape))
        if not case.sinks and case.mask == "causal" and case.slots == "identity":  # a head's sums total its rows
            assert np.allclose(results[0][0].sum(axis=1), case.n_q * case.gqa, rtol=1e-4)


def test_probe_rows_equal_definition(lib: CDLL) -> None:
    rows = np.zeros(600, np.int32)
    for n, at, share, page, seed in (
        (512, 0, 0.1, 160, 0),
        (512, 512, 0.1, 160, 5),
        (1, 158, 0.1, 160, 0),
        (40, 7, 1.0, 96, 1),
        (33, 9, 0.5, 32, 2),
    ):
        got = lib.kvq_probe_rows(n, at, share, page, seed, rows.ctypes.data_as(POINTER(c_int32)))
        assert rows[:got].tolist() == saliency.probe_rows(n, at, share, page, seed)
    one_by_one = [
        at for at in range(1600) if lib.kvq_probe_rows(1, at, 0.1, 160, 3, rows.ctypes.data_as(POINTER(c_int32)))
    ]
    assert one_by_one == [at for at in range(1600) if saliency.probe_rows(1, at, 0.1, 160, 3)]
    assert all(at in one_by_one for at in range(1600) if at % 160 >= 152) and 120 < len(one_by_one) < 200
    assert not all(at in one_by_one for at in range(151, 1600, 160))  # 5 % of 160 are 8, also with a share in f32
    for n, probes in ((40, 4), (100, 10), (2000, 200)):
        assert len(saliency.probe_rows(n, 0, 0.1, 160, 0)) == probes
    prompt = saliency.probe_rows(512, 0, 0.1, 160, 0)
    assert len(prompt) == 52 and set(range(486, 512)) <= set(prompt)
    assert saliency.probe_rows(512, 0, 0.1, 160, 1) != prompt  # another layer, other rows


def test_normalised_scores_find_a_late_cell() -> None:
    """A late cell that every row behind it looks at: sums are larger for the first cells, which more rows see
    (section 4.2).
    """
    n, late = 256, 200
    weights = np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]
    weights[late:, late] = 0.05
    sums, seen = weights.sum(axis=0), n - np.arange(n)
    assert saliency.choose(sums, None, 1)[:16].any()
    assert saliency.choose(sums, seen, 1)[late]
