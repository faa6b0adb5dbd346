"""Scripts that measure: trace_cuda.py from a written trace, compare_builds.py with programs that say their speed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import trace_cuda  # noqa: E402

PRODUCT = "void mul_mat_vec_q<(ggml_type)2, 1, true>(void const*, float*)"
DECODE = "void (anonymous namespace)::decode_kernel<128, 2, 2, false, 0, false, 0>(kvq_attend_args)"
LOGITS = "void (anonymous namespace)::decode_kernel<128, 2, 2, false, 0, false, 1>(kvq_attend_args)"


def write(path: Path, lines: list[tuple[int, int, str]]) -> Path:
    path.write_text("".join(f"{start},{end},8,0,{name}\n" for start, end, name in lines))
    return path


def test_overlap_counts_once_and_waits_are_named(tmp_path: Path) -> None:
    """Two layers a step. The second kernel of a layer starts before the first one has ended; a part of attention that
    only leaves logits is no step of its own.
    """
    lines, t = [], 0
    for _ in range(5 * 2):
        lines += [(t, t + 3000, PRODUCT), (t + 2000, t + 4000, LOGITS), (t + 4000, t + 9000, DECODE)]
        t += 10000
    us, runs = trace_cuda.account(write(tmp_path / "t.csv", lines), "token", layers=2, last=3)
    assert us["mul_mat_vec_q<2,1,true>"] == pytest.approx(6) and runs["mul_mat_vec_q<2,1,true>"] == pytest.approx(2)
    assert us["decode_kernel<128,2,2,false,0,false,1>"] == pytest.approx(2)  # 1 us of each overlaps
    assert us["decode_kernel<128,2,2,false,0,false,0>"] == pytest.approx(10)
    assert us["(waits)"] == us["decode_kernel<128,2,2,false,0,false,0> -> mul_mat_vec_q<2,1,true>"] == pytest.approx(2)
    assert us["(all)"] == pytest.approx(20)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nothing\n", "no line of a trace"),
        (f"1,2,8,0,{DECODE}\n", "1 attention kernels of kind token, and a step has 32"),
    ],
)
def test_what_is_no_trace_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "trace_cuda.py", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and says in done.stderr and done.stderr.count("\n") == 1 and not done.stdout


def test_builds_are_compared_in_turns(tmp_path: Path) -> None:
    """Programs that say how fast they are: B is twice as fast with our caches, A as fast with upstream's."""
    for name, ours in (("a", 50), ("b", 100)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "libggml-kvq.so").touch()
        program = tmp_path / name / "llama-bench"
        program.write_text(
            f'#!/bin/sh\nspeed=80\n[ -n "$KVQ_METHOD" ] && speed={ours}\necho "[{{\\"samples_ts\\": [1, $speed]}}]"\n'
        )
        program.chmod(0o755)
    command = [sys.executable, str(ROOT / "scripts" / "compare_builds.py"), str(tmp_path / "a"), str(tmp_path / "b")]
    done = subprocess.run([*command, "-m", "m", "--minutes", "0"], capture_output=True, text=True, check=True)
    rows = {line[:14].strip(): line for line in done.stdout.splitlines() if "generation" in line}
    assert "1.000   1.000 to 1.000     1" in rows["upstream f16"] and " 0.500   0.500 to 0.500 " in rows["kivi"]
    missing = subprocess.run([*command[:3], str(tmp_path), "-m", "m"], capture_output=True, text=True, check=False)
    assert missing.returncode == 2 and "holds no llama-bench and libggml-kvq.so" in missing.stderr
