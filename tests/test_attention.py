"""kvq_attend against f64, on every instruction set of this machine. Tolerances are derived in attention_bounds.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_bounds import expected
from attention_cases import FILL, build, cases, dst_view
from ggml_kvq.core import kernels, loader, native
from ggml_kvq.errors import MethodError
from ggml_kvq.reference import K, V

CASES = cases()
ISAS = ("portable", "avx2", "avx512-vnni", "avx512-amx", "neon-dot")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """{kernel name: {"<case> <threads>": dst buffer}} for every kernel this CPU runs; the default one is among them."""
    out = {}
    for isa in ISAS:
        path = tmp_path_factory.mktemp("attention") / "out.npz"
        env = {**os.environ, "KVQ_ISA": isa, "OMP_WAIT_POLICY": "passive"}
        worker = Path(__file__).with_name("attention_cases.py")
        done = subprocess.run(
            [sys.executable, str(worker), str(path)], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{isa}: {done.stderr[-2000:]}"
        result = dict(np.load(path))
        if str(result["kernel"]) == isa:
            out[isa] = result
        else:
            assert f"KVQ_ISA={isa} is not available" in done.stderr
    assert "portable" in out
    return out


RUNS = ("1", "2", "all 1", "all 2")  # threads; all: every case a stream of one call


@pytest.fixture(params=range(len(CASES)), ids=lambda i: CASES[i].name)
def at(request: pytest.FixtureRequest) -> Any:
    return request.param, CASES[request.param]


def runs(outputs: Any, i: Any) -> Any:
    return [
        (f"{CASES[i]} on {isa}, run {run}", result[f"{i} {run}"].copy())
        for isa, result in outputs.items()
        for run in RUNS
    ]


def test_output_is_finite_and_stays_inside_dst(outputs: Any, at: Any) -> None:
    i, case = at
    for what, buffer in runs(outputs, i):
        got = dst_view(case, buffer)
        assert np.isfinite(got).all(), f"not finite: {what}"
        assert (np.abs(got) < -FILL / 2).all(), f"not written: {what}"
        got[:] = FILL
        assert (buffer == FILL).all(), f"wrote outside of dst: {what}"


@pytest.mark.parametrize("folded", [False, True], ids=["exact", "folded"])
def test_against_f64(outputs: Any, at: Any, folded: Any) -> None:
    i, case = at
    want, bound = expected(case, folded)
    for what, buffer in runs(outputs, i):
        got = dst_view(case, buffer)
        over = np.abs(got - want) / bound
        worst = np.unravel_index(over.argmax(), over.shape)
        assert over.max() <= 1, f"{worst}: {got[worst]} instead of {want[worst]} +- {bound[worst]}: {what}"


def test_kernels_agree(outputs: Any, at: Any) -> None:
    """Instruction sets, thread counts and company in a call: the same result up to twice the arithmetic's bound;
    without splits between threads, the other streams of a call change no bit.
    """
    i, case = at
    _, bound = expected(case, True)
    first = dst_view(case, outputs["portable"][f"{i} 1"])
    for what, buffer in runs(outputs, i):
        assert (np.abs(dst_view(case, buffer) - first) <= 2 * bound).all(), f"differs from portable: {what}"
    for isa, result in outputs.items():
        assert np.array_equal(result[f"{i} 1"], result[f"{i} all 1"]), (
            f"{case}: {isa} depends on the other streams of a call"
        )


def test_the_bounds_can_be_missed() -> None:
    """A tolerance that swallows the result tests nothing: median bound over median output, folded within 0.3 %,
    exact within 1/2.
    """
    for folded, most in ((True, 0.003), (False, 0.5)):
        ratio = []
        for case in CASES:
            want, bound = expected(case, folded)
            if want.any():
                ratio.append(np.median(bound[want != 0]) / np.median(np.abs(want[want != 0])))
        assert np.median(ratio) < most and np.quantile(ratio, 0.2) < most / 10


def test_rows_without_any_cell_are_zero(outputs: Any) -> None:
    seen = 0
    for i, case in enumerate(CASES):
        empty = np.isneginf(build(case).slot_mask()).all(axis=-1)  # [n_q, 1 or n_head]
        for isa, result in outputs.items():
            rows = dst_view(case, result[f"{i} 2"])[np.broadcast_to(empty, (case.n_q, case.n_head))]
            assert not rows.any(), f"{case} on {isa}"
            seen += len(rows)
    assert seen > 100


def test_folding_is_seen_and_the_f32_flag_avoids_it(outputs: Any) -> None:
    """The folded arithmetic is used, and not with KVQ_ATTN_F32: median error over median output, an order apart on
    either side.
    """
    by_name = {c.name: i for i, c in enumerate(CASES)}
    for name, low, high in (("2 bits sealed", 2e-5, 1e-3), ("2 bits sealed f32", 0, 2e-6)):
        i = by_name[name]
        want, _ = expected(CASES[i], False)
        for isa, result in outputs.items():
            error = np.median(np.abs(dst_view(CASES[i], result[f"{i} 1"]) - want)) / np.median(np.abs(want))
            assert low <= error <= high, f"{name} on {isa}: {error}"


def test_default_kernel_is_the_best_one(outputs: Any) -> None:
    name = loader.libraries().need_kvq().kvq_kernel_name().decode()
    want = os.environ.get("KVQ_ISA")
    assert name == (want if want in outputs else [isa for isa in ISAS if isa in outputs][-1])


# ------------------------------------------------------------------ refusals


def bad(**fields: Any) -> Any:
    stream = build(CASES[0]).stream(np.zeros(1 << 20, np.float32))
    for key, value in fields.items():
        setattr(stream, key, value)
    return stream


@pytest.mark.parametrize(
    "stream",
    [
        lambda: bad(n_head_kv=5),
        lambda: bad(n_head_kv=0),
        lambda: bad(k=CASES[0].codec(K).with_(head_size=12)),
        lambda: bad(v=CASES[0].codec(V).with_(bits=7, type=1)),
        lambda: bad(k=CASES[0].codec(K).with_(type=7)),
    ],
)
def test_impossible_shapes_are_refused_with_a_line(stream: Any) -> None:
    lib = loader.libraries().need_kvq()
    with pytest.raises(MethodError) as e:
        kernels.attend(lib, [stream()])
    assert "without a message" not in str(e.value)


def test_null_is_refused() -> None:
    lib = loader.libraries().need_kvq()
    with pytest.raises(MethodError):
        native.check(lib, lib.kvq_attend(None, 1, 1))
