"""ggml-kvq bench: rows of real llama-bench runs, ratios, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import run_python
from ggml_kvq import bench, cli, plotting
from ggml_kvq.evaluate.specs import parse

QUICK = ["-d", "64,256", "-n", "4", "-r", "1", "--rounds", "2", "-t", "2"]


def test_rows_and_table(demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "speed.jsonl"
    assert (
        cli.main(
            [
                "bench",
                "-m",
                str(demo_model),
                "--cache",
                "kivi:bits=2",
                "--cache",
                "upstream:q8_0",
                *QUICK,
                "-p",
                "32",
                "-o",
                str(out),
            ]
        )
        == 0
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    tests = [(r["n_gen"], r["n_prompt"], r["n_depth"]) for r in rows[::3]]
    assert tests == [(4, 0, 64), (4, 0, 256), (0, 32, 64), (0, 32, 256)]
    for first, *others in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        assert first["cache"] == "f16" and first["ratio"] == 1
        for r in others:
            assert len(r["samples_ts"]) == 2 and r["ratio"] == pytest.approx(r["avg_ts"] / first["avg_ts"])
    assert {r["type_k"] for r in rows if r["cache"] == "q8_0"} == {"q8_0"}
    table = capsys.readouterr().out
    assert "kivi:bits=2" in table and "tg4 @ 256" in table
    for picture in plotting.speed(rows, tmp_path / "speed"):
        assert picture.stat().st_size > 5000


def test_the_command_of_a_row_is_what_ran(demo_model: Path) -> None:
    argv, env = bench.command(demo_model, parse("xquant:window=64"), bench.Settings(), 128, "tg")
    assert argv[argv.index("-dev") + 1] == "KVQ0" and env["KVQ_METHOD"] == "xquant" and env["KVQ_OPTS"] == "window=64"
    argv, env = bench.command(demo_model, parse("upstream:q4_0"), bench.Settings(), 128, "tg")
    assert argv[argv.index("-ctk") + 1] == "q4_0" and not env


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--cache", "kivi:bits=9"], ["bits=9", "1..4"]),
        (["--cache", "kivi", "--cache", "kivi"], ["same name"]),
        (["-n", "0"], ["nothing to measure"]),
        (["--cache", "aqua"], ["cache aqua: ", "holds none: write aqua@FILE.gguf (", "or aqua:predictor=none"]),
        (["--cache", "specache:near=aqua"], ["write specache@FILE.gguf (", "or specache:near=higgs"]),
        (["--cache", "x=upstream:q1_0"], ["cache x: llama-bench ended with 1: "]),
    ],
)
def test_refusals(demo_model: Path, args: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "-m", str(demo_model), "-d", "16", "-n", "1", "-r", "1", "--rounds", "1", *args]) == 2
    out, err = capsys.readouterr()
    message = err.strip().splitlines()[-1]
    assert all(p in message for p in parts), message
    assert out == "" and "round" not in err  # nothing was timed


@pytest.mark.parametrize("args", [["-d", "many"], ["-d", "-5"], ["--rounds", "0"], ["-t", "0"], ["-r", "x"]])
def test_numbers_that_are_none(demo_model: Path, args: list[str]) -> None:
    with pytest.raises(SystemExit) as e:
        cli.main(["bench", "-m", str(demo_model), *args])
    assert e.value.code == 2


def test_a_model_that_is_not_there_is_seen_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "-m", "/nowhere.gguf"]) == 2
    assert capsys.readouterr().err == "ggml-kvq bench: error: /nowhere.gguf is not a file; give -m a GGUF model\n"


def test_bits_of_a_short_context_are_possible_and_have_means(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ "3.00 bits are not possible at 256 tokens: raise bits or the context" said programs that have no -c, and the
    cache that was measured had no means, where eval's had.
    """
    monkeypatch.setenv("KVQ_CACHE_DIR", str(tmp_path))
    out = tmp_path / "rows.jsonl"
    argv = ["bench", "-m", str(demo_model), "--cache", "auto:bits=2.5", "-d", "0,512", "-n", "2", "-r", "1", "-t", "1"]
    assert cli.main([*argv, "--rounds", "1", "-o", str(out)]) == 0
    assert "measuring its keys and values" in capsys.readouterr().err
    assert len(out.read_text().splitlines()) == 4
    call = "import sys; from ggml_kvq.launch import launcher; sys.exit(launcher.llama_bench())"
    done = run_python(call, "-m", str(demo_model), "--kv-bits", "3", "-p", "0", "-n", "2", "-r", "1", "-t", "1")
    assert done.returncode == 0 and "ggml-kvq: auto [bits=3], K" in done.stderr, done.stderr[-2000:]
