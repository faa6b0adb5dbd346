"""What the papers' formulas promise, measured on the blocks themselves: XQuant (Yang et al. 2025, sections 3.2,
3.3), KIVI (arXiv 2402.02750), and one-bit blocks of SpeCache (arXiv 2503.16163).
"""

from __future__ import annotations

from ctypes import CDLL
from typing import Any

import numpy as np
import pytest
from ggml_kvq import reference as ref
from ggml_kvq.core import kernels, loader, native
from ggml_kvq.reference import AFFINE, Codec, K, LayerShape, V, xquant

SHAPE = (8, 128, 128)  # KV heads, key and value channels


@pytest.fixture(scope="module")
def lib() -> Any:
    return loader.libraries().need_kvq()


def shapes(n: int, shape: Any = SHAPE) -> Any:
    return [(il, *shape) for il in range(n)]


def round_trip(lib: CDLL, c: Any, rows: Any) -> Any:
    return kernels.decode(lib, c, *kernels.encode(lib, c, rows)).astype(np.float64)


def codec(
    role: Any = K,
    bits: int = 2,
    group: int = 32,
    eta: float = 0.0,
    levels: int = 0,
    n_cells: Any = None,
    head_size: int = 128,
) -> Any:
    return Codec(AFFINE, role, bits, group, 0, levels, eta, n_cells or max(32, group), head_size)


# ------------------------------------------------------------------ blocks


@pytest.mark.parametrize("eta", [0.0, 0.1, 1 / 6, 0.25, 1 / 3, 0.45])
def test_error_of_one_bit_on_uniform_data(lib: CDLL, eta: float) -> None:
    """MSE / range^2 = eta^2 - eta/2 + 1/12 inside a group; its two extremes err by eta * range each."""
    c = codec(bits=1, group=256, eta=eta, head_size=1024)
    rows = np.random.default_rng(1).uniform(0, 1, (256, 1024)).astype(np.float16)
    err = (round_trip(lib, c, rows) - rows.astype(np.float64)) / (rows.max(0) - rows.min(0)).astype(np.float64)
    law = eta**2 - eta / 2 + 1 / 12
    expected = (254 * law + 2 * eta**2) / 256
    # 2^18 values; the spread of a squared error is at most range^2/4: 4 standard errors
    assert abs((err**2).mean() - expected) < 4 * (err**2).std() / 512 + 1e-5


def test_minimum_is_at_a_quarter(lib: CDLL) -> None:
    rows = np.random.default_rng(2).uniform(0, 1, (256, 1024)).astype(np.float16)
    grid = np.linspace(0, 0.48, 25)
    mse = [((round_trip(lib, codec(bits=1, group=256, eta=e, head_size=1024), rows) - rows) ** 2).mean() for e in grid]
    assert grid[int(np.argmin(mse))] == pytest.approx(0.25, abs=0.021)
    assert min(mse) == pytest.approx(1 / 48, rel=0.02)


@pytest.mark.parametrize("role", [K, V])
def test_improved_one_bit_kivi_is_eta_one_quarter(lib: CDLL, role: int) -> None:
    """SpeCache's 1-bit blocks: two equal bins, reconstructed at their centres lo + r/4 and lo + 3r/4."""
    rows = np.random.default_rng(3).normal(size=(32, 128)).astype(np.float16)
    improved = round_trip(lib, codec(role, bits=1, levels=1, eta=0.25), rows)
    assert np.array_equal(improved, round_trip(lib, codec(role, bits=1, eta=0.25), rows))
    x = rows.astype(np.float64) if role == K else rows.astype(np.float64).reshape(-1, 32).T
    lo, r = x.min(0), np.ptp(x, axis=0)
    y = lo + np.where(x >= lo + r / 2, 0.75, 0.25) * r
    y = y if role == K else y.T.reshape(32, 128)
    # zero and scale are rounded to f16, then their sum: 2^-11 of each
    assert np.abs(improved - y).max() <= 2**-11 * (np.abs(lo).max() + r.max()) * 2


@pytest.mark.parametrize("role", [K, V])
def test_eta_zero_is_kivi(lib: CDLL, role: int) -> None:
    """lo + round((x - lo)/s) * s by the formula of KIVI section 3, in f64; differences only where f32 and f64 round
    a tie apart.
    """
    rows = np.random.default_rng(4).normal(size=(32, 128)).astype(np.float16)
    x = rows.astype(np.float64) if role == K else rows.astype(np.float64).reshape(-1, 32).T
    for bits in (1, 2, 3, 4):
        lo, s = x.min(0), np.ptp(x, axis=0) / ((1 << bits) - 1)
        y = (x - lo) / s
        tie = np.abs(y - np.floor(y) - 0.5) < 1e-5
        y = lo + np.floor(y + 0.5) * s
        y, tie = (y, tie) if role == K else (y.T.reshape(32, 128), tie.T.reshape(32, 128))
        err = np.abs(round_trip(lib, codec(role, bits), rows) - y)
        assert err[~tie].max() <= 2**-11 * (np.abs(lo).max() + 2 * (s * ((1 << bits) - 1)).max())


def test_unshared_two_bit_xquant_is_kivi(lib: CDLL) -> None:
    """kq = vq = km = vm = L and eta 0: the plan of KIVI-2, lane by lane, and the same bytes in memory."""
    layers = [LayerShape(*s) for s in shapes(8)]
    x = ref.METHODS["xquant"](kq=8, vq=8, km=8, vm=8, eta1=0.0, eta2=0.0).plans(layers)
    assert x == ref.METHODS["kivi"]().plans(layers)
    a = native.plan(lib, "xquant", "kq=8,vq=8,km=8,vm=8,eta1=0,eta2=0", shapes(8), 4096)
    b = native.plan(lib, "kivi", "", shapes(8), 4096)
    same = [k for k in a if k not in ("method", "options")]
    assert {k: a[k] for k in same} == {k: b[k] for k in same}


@pytest.mark.parametrize(("group", "relative"), [(32, 1.96), (64, 2.75), (128, 3.56)])
def test_rounding_to_end_points_at_one_bit_is_worse_than_zero(lib: CDLL, group: int, relative: float) -> None:
    rows = np.random.default_rng(5).normal(size=(128, 1024)).astype(np.float16)
    mse = ((round_trip(lib, codec(bits=1, group=group, n_cells=128, head_size=1024), rows) - rows) ** 2).mean()
    assert mse > 1 and mse == pytest.approx(relative, rel=0.02)


@pytest.mark.parametrize(
    ("bits", "eta", "levels", "relative"),
    [
        (1, 1 / 6, 0, 0.69),
        (1, 0.25, 0, 0.41),
        (2, 0.0, 0, 0.154),
        (2, 0.045, 0, 0.135),
        (2, 1 / 8, 1, 0.102),
        (3, 0.0, 0, 0.028),
    ],
)
def test_error_on_gaussian_groups_of_32(lib: CDLL, bits: int, eta: float, levels: int, relative: float) -> None:
    """Relative error of the quantisers that the methods use, against the errors that their formulas give."""
    rows = np.random.default_rng(6).normal(size=(256, 1024)).astype(np.float16)
    c = codec(bits=bits, eta=eta, levels=levels, n_cells=256, head_size=1024)
    assert ((round_trip(lib, c, rows) - rows) ** 2).mean() == pytest.approx(relative, rel=0.02)


# ------------------------------------------------------------------ bits and bytes


@pytest.mark.parametrize(
    ("kq", "vq", "km", "vm", "bits"),
    [
        (30, 2, 32, 16, 1.375),
        (28, 0, 32, 28, 1.40625),
        (32, 0, 32, 20, 1.40625),
        (32, 0, 32, 16, 1.375),
        (32, 32, 32, 8, 1.625),
        (32, 32, 32, 32, 2.0),
        (32, 0, 32, 32, 1.5),
        (26, 0, 32, 0, 1.15625),
        (0, 0, 0, 0, 0.5),
    ],
)
def test_equivalent_bits(lib: CDLL, kq: int, vq: int, km: int, vm: int, bits: int) -> None:
    """The five checks of XQuant's formula, and the plan's own count of code bits."""
    assert xquant.equivalent_bits(32, kq, vq, km, vm) == bits
    plan = native.plan(lib, "xquant", {"kq": kq, "vq": vq, "km": km, "vm": vm}, shapes(32), 1024)
    assert plan["bits_headline"] == pytest.approx(bits, abs=1e-12)


@pytest.mark.parametrize("n_layer", [2, 6, 12, 16, 22, 24, 28, 32, 36, 80])
@pytest.mark.parametrize("preset", list(xquant.PRESETS))
def test_presets_keep_pairs_whole_at_any_depth(lib: CDLL, preset: Any, n_layer: int) -> None:
    s = xquant.splits(preset, n_layer)
    assert all(v % 2 == 0 and 0 <= v <= n_layer for v in s.values())
    plan = native.plan(lib, "xquant", {"preset": preset}, shapes(n_layer), 1024)
    assert plan["bits_headline"] == pytest.approx(xquant.equivalent_bits(n_layer, **s), abs=1e-12)


@pytest.mark.parametrize(
    ("preset", "n_layer", "bits"),
    [("1.38", 12, 1.375), ("1.38", 16, 1.375), ("1.38", 32, 1.375), ("1.41", 32, 1.40625), ("1.16", 32, 1.15625)],
)
def test_presets_keep_their_bits(lib: CDLL, preset: Any, n_layer: int, bits: int) -> None:
    assert native.plan(lib, "xquant", {"preset": preset}, shapes(n_layer), 1024)["bits_headline"] == pytest.approx(bits)


def pad64(n: int) -> Any:
    return -(-n // 64) * 64


def closed_bytes(plan: Any, shape: LayerShape, n_cells: int, n_stream: int) -> Any:
    """(codes, params, window) of a layer in bytes, from the formulas alone; each allocation is rounded up to 64."""
    out = np.zeros(3, np.int64)
    for lane, d in ((plan.k, shape.head_size_k), (plan.v, shape.head_size_v)):
        c = lane.codec
        page, h = c.n_cells, shape.n_head_kv
        pages = -(-n_cells // page)
        window = (
            pages * page
            if c.type == ref.F16
            else min(max(-(-plan.window // page), 1) + -(-plan.sinks // page), pages) * page
        )
        out[2] += pad64(n_stream * window * h * 2 * (-(-d // 16) * 16))
        if c.type == ref.F16:
            continue
        # d is a multiple of 32 here and pages are, so codes have no padding: bits/8 bytes a value
        own = 0 if lane.shares_codes else n_stream * pages * page * h * d * c.bits // 8
        groups = n_stream * pages * page * h * d // c.group
        out[0] += pad64(own)
        out[1] += pad64(groups * (2 if c.scale else 4) + (8 * n_stream * pages * h if c.scale else 0))
    return tuple(out)


CASES = [
    ("f16", {}),
    ("kivi", {}),
    ("kivi", {"bits": 1}),
    ("kivi", {"bits": 3, "group": 64}),
    ("kivi", {"bits": 4, "group": 128, "window": 0}),
    ("kivi", {"k_bits": 4, "v_bits": 2, "group_v": 64, "scales": "u8"}),
    ("kivi", {"sinks": 4, "window": 256}),
    ("xquant", {}),
    ("xquant", {"preset": "1.16", "scales": "u8"}),
    ("xquant", {"preset": "1.41", "group": 64, "sinks": 33}),
    ("xquant", {"shared": "none"}),
    ("xquant", {"kq": 2, "vq": 2, "km": 0, "vm": 0}),
]


@pytest.mark.parametrize(("method", "opts"), CASES, ids=str)
@pytest.mark.parametrize(("n_cells", "n_stream"), [(4096, 1), (32768, 1), (1000, 3), (32, 2)])
def test_bytes_follow_the_formulas(lib: CDLL, method: str, opts: Any, n_cells: int, n_stream: int) -> None:
    layers = [LayerShape(*s) for s in shapes(12)]
    got = native.plan(lib, method, opts, shapes(12), n_cells, n_stream=n_stream)
    plans = ref.METHODS[method](**opts).plans(layers)
    want = np.sum([closed_bytes(p, s, n_cells, n_stream) for p, s in zip(plans, layers)], axis=0)
    assert (got["bytes_codes"], got["bytes_params"], got["bytes_window"]) == tuple(want)
    values = 12 * n_cells * n_stream * SHAPE[0] * (SHAPE[1] + SHAPE[2])
    assert got["bytes_f16"] == 2 * values
    parts = ("bytes_codes", "bytes_params", "bytes_window", "bytes_tables", "bytes_calibration", "bytes_chain")
    assert got["bytes_total"] == sum(got[p] for p in parts)
    assert got["bits"] == pytest.approx(8 * got["bytes_total"] / values)
    assert got["bits"] == pytest.approx((got["bits_k"] + got["bits_v"]) / 2)


@pytest.mark.parametrize(
    ("method", "opts", "floor", "table_4k", "table_32k"),
    [
        ("kivi", {}, 3.0, 3.31, 3.04),
        ("kivi", {"group": 64}, 2.5, 2.82, 2.54),
        ("kivi", {"group": 128}, 2.25, 2.57, 2.29),
        ("xquant", {}, 2.375, 2.70, 2.42),
        ("xquant", {"preset": "1.41"}, 2.40625, 2.73, 2.45),
        ("xquant", {"preset": "1.16"}, 2.15625, 2.48, 2.20),
        ("xquant", {"kq": 32, "vq": 0, "km": 32, "vm": 32}, 2.5, 2.82, 2.54),
    ],
    ids=str,
)
def test_true_bits_of_the_papers_shape(
    lib: CDLL, method: str, opts: Any, floor: Any, table_4k: Any, table_32k: Any
) -> None:
    """8B shape. Floor = code bits + 32/group; papers count (16 - floor) * 96/T, the average residual (half
    the keys' 128 rows, all of the values'), which replaces sealed cells. We allocate both: 16 * 128/T on top of the
    floor, and page tables.
    """
    for n_cells, table in ((4096, table_4k), (32768, table_32k)):
        assert floor + (16 - floor) * 96 / n_cells == pytest.approx(table, abs=0.008)
        got = native.plan(lib, method, opts, shapes(32), n_cells)
        tables = 16 * got["bytes_tables"] / got["bytes_f16"]
        assert got["bits"] - tables == pytest.approx(floor + 16 * 128 / n_cells, abs=1e-9)
        assert tables < 0.03


def test_one_bit_codes_are_not_kept_in_two_bit_fields(lib: CDLL) -> None:
    a, b = (native.plan(lib, "kivi", {"bits": n}, shapes(4), 4096)["bytes_codes"] for n in (1, 2))
    assert 2 * a == b == 4 * 4096 * SHAPE[0] * 2 * 128 * 2 // 8


def test_sharing_stores_the_codes_of_a_pair_once(lib: CDLL) -> None:
    opts: dict[str, object] = {"kq": 4, "vq": 4, "km": 0, "vm": 0}
    shared = native.plan(lib, "xquant", opts, shapes(4), 4096)
    own = native.plan(lib, "kivi", {}, shapes(4), 4096)
    assert 2 * shared["bytes_codes"] == own["bytes_codes"] and shared["bytes_params"] == own["bytes_params"]


def test_layers_of_unlike_shape_do_not_share(lib: CDLL) -> None:
    mixed = [(0, 8, 128, 128), (1, 4, 128, 128), (2, 4, 128, 128), (3, 4, 128, 128)]
    layers = [LayerShape(*s) for s in mixed]
    opts: dict[str, object] = {"kq": 4, "vq": 4, "km": 0, "vm": 0}
    plans = ref.METHODS["xquant"](**opts).plans(layers)
    assert [p.k.shares_codes for p in plans] == [False, False, False, True]
    want = np.sum([closed_bytes(p, s, 4096, 1) for p, s in zip(plans, layers)], axis=0)
    assert native.plan(lib, "xquant", opts, mixed, 4096)["bytes_codes"] == want[0]


# ------------------------------------------------------------------ sharing against no codes (XQuant, section 3.3)


def test_codes_of_unrelated_layers_agree_by_chance(lib: CDLL) -> None:
    """2-bit codes of two independent Gaussian layers differ by at most 1 in 81.5 % of values: the paper's own
    statistic is chance.
    """
    rng = np.random.default_rng(7)
    c = codec(n_cells=256, head_size=1024)
    a, b = (
        ref.affine.unpack(c, kernels.encode(lib, c, rng.normal(size=(256, 1024)).astype(np.float16))[0]).astype(int)
        for _ in range(2)
    )
    d = np.abs(a - b)
    assert [(d <= 1).mean(), (d == 0).mean(), (d == 3).mean()] == pytest.approx([0.815, 0.336, 0.021], abs=0.005)


@pytest.mark.parametrize(("rho", "relative"), [(0.0, 1.06), (0.5, 0.907), (0.8, 0.645), (0.95, 0.448)])
def test_error_of_adopted_one_bit_codes(lib: CDLL, rho: Any, relative: float) -> None:
    """Best eta over a grid for codes of a layer whose values correlate by rho with ours (groups of 32)."""
    rng = np.random.default_rng(8)
    a, noise = rng.normal(size=(2, 256, 1024))
    b = (rho * a + np.sqrt(1 - rho**2) * noise).astype(np.float16)
    best = np.inf
    for eta in np.linspace(0.2, 0.49, 15):
        c = codec(bits=1, eta=eta, n_cells=256, head_size=1024)
        codes, _ = kernels.encode(lib, c, a.astype(np.float16))
        _, params = kernels.encode(lib, c, b, shared=codes)
        best = min(best, ((kernels.decode(lib, c, codes, params).astype(np.float64) - b) ** 2).mean())
    assert best == pytest.approx(relative, rel=0.03)


def test_value_blocks_use_the_other_axis(lib: CDLL) -> None:
    """Keys with outlier channels cost little per channel and much per token; the roles are not interchangeable
    (KIVI section 3).
    """
    x = np.random.default_rng(9).normal(size=(32, 128))
    x[:, ::32] *= 50
    x = x.astype(np.float16)
    err = {role: ((round_trip(lib, codec(role), x) - x) ** 2)[:, 1::32].mean() for role in (K, V)}
    assert err[V] > 10 * err[K]
