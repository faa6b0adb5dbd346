"""Outputs that are inputs, outputs that are no files, and what was dropped without a word: each of these destroyed a
file, or gave a worse figure as if it were the one that was asked for.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, run_python
from ggml_kvq import KvqError, Model, cli, default_means, errors, files
from ggml_kvq.evaluate import results, specs
from ggml_kvq.launch import launcher

CLI = "import sys; from ggml_kvq.cli import main; sys.exit(main())"
TEXT = str(ROOT / "examples/prompt.txt")


@pytest.fixture
def folder(demo_model: Path, tmp_path: Path) -> Path:
    """A model, a text, a sidecar and rows of results."""
    shutil.copy(demo_model, tmp_path / "m.gguf")
    shutil.copy(TEXT, tmp_path / "t.txt")
    assert (
        cli.main(["calibrate", "--method", "xquant", "-m", str(tmp_path / "m.gguf"), "-o", str(tmp_path / "s.gguf")])
        == 0
    )
    (tmp_path / "r.jsonl").write_text('{"key": {"part": "text"}}\n')
    return tmp_path


@pytest.mark.parametrize(
    "argv",
    [
        "calibrate -m m.gguf -f t.txt -o m.gguf",
        "calibrate -m m.gguf -f t.txt -o t.txt",
        "calibrate -m m.gguf -f t.txt -o ./link.gguf",
        "calibrate --method xquant -m m.gguf -o m.gguf",
        "tune -m m.gguf -f t.txt -o m.gguf",
        "tune -m m.gguf -f t.txt -o t.txt",
        "embed m.gguf s.gguf m.gguf",
        "embed m.gguf s.gguf s.gguf",
        "embed m.gguf s.gguf r.jsonl --card r.jsonl",
        "report r.jsonl -o r.jsonl",
        "bench -m m.gguf -o m.gguf",
        "bench -m m.gguf -o t.txt",
        "eval -m m.gguf -f t.txt -o m.gguf",
    ],
)
def test_no_command_writes_over_what_it_reads(
    argv: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    os.symlink("m.gguf", "link.gguf")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    capsys.readouterr()
    assert cli.main(argv.split()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert "choose another name" in err or "repair or remove that line" in err, err
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


@pytest.mark.parametrize("name", ["m.gguf", "s.gguf", "d.gguf"])
def test_figures_of_the_cache_do_not_replace_a_model(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    shutil.copy("m.gguf", "d.gguf")
    argv = ["-m", "m.gguf", "--kv-method", "xquant", "--kv-config", "s.gguf", "-md", "d.gguf", "--kv-stats-file"]
    with pytest.raises(KvqError, match=f"--kv-stats-file {name} is a file that is read"):
        launcher.command("llama-server", [*argv, name], {})
    assert launcher.command("llama-server", [*argv, "stats.json"], {}).env["KVQ_STATS_FILE"]


def test_a_state_does_not_replace_the_model_that_is_open(folder: Path) -> None:
    size = (folder / "m.gguf").stat().st_size
    with Model(folder / "m.gguf", "kivi", n_ctx=256, n_threads=1) as m:
        "".join(m.generate("The file", max_tokens=2))
        with pytest.raises(errors.StateError, match="is a file that is read"):
            m.save_state(folder / "m.gguf")
    assert (folder / "m.gguf").stat().st_size == size


def test_results_are_files(tmp_path: Path) -> None:
    """Some devices have no end: reading /dev/full took all memory."""
    with pytest.raises(KvqError, match="is not a file"):
        results.read(os.devnull)
    (tmp_path / "r.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(KvqError, match="is no file of results"):
        results.read(tmp_path / "r.jsonl")


def test_a_last_line_without_an_end_gets_one(tmp_path: Path) -> None:
    """An editor left it so: the next row was glued to it, and the file could not be read any more."""
    key = {"kind": "text", "cache": "a", "model": "m"}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"key": key}))
    results.ResultFile(path).add({**key, "cache": "b"}, {})
    assert [row["key"]["cache"] for row in results.read(path)] == ["a", "b"]
    files.append_line(path, "{}")
    assert path.read_text().count("\n") == 3


@pytest.mark.parametrize("line", ["3", "null", "[1]", '"key"', '{"key": "abc"}'])
def test_a_line_that_is_no_row_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n" + line + "\n")
    with pytest.raises(errors.KvqError, match=r"rows.jsonl:2 is no row of results; remove that line"):
        results.read(path)


def test_rows_that_lack_figures_are_left_out_of_pages_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cache that breaks a model leaves NaN in its row. f16 rows of another window have nothing beside them."""
    key: dict[str, Any] = {"kind": "text", "model": "m.gguf", "text": "t", "n_ctx": 512, "n_ubatch": 64}
    rest = {"ppl": 9.0, "same_top": 0.9, "bytes_total": 1 << 20}
    f16: dict[str, Any] = {
        "key": {**key, "cache": "f16", "spec": "f16"},
        "method": "upstream",
        "bits": 16,
        "bits_no_window": 16,
    }
    kivi: dict[str, Any] = {
        "key": {**key, "cache": "kivi", "spec": "kivi"},
        "method": "kivi",
        "bits": 3.0,
        "bits_no_window": 2.5,
    }
    rows = [
        {**f16, **rest, "kld_mean": 0.0},
        {**f16, **rest, "kld_mean": 0.0, "key": {**f16["key"], "n_ctx": 1024}},
        {**kivi, **rest, "kld_mean": 0.1},
        {**kivi, **rest, "kld_mean": float("nan"), "key": {**kivi["key"], "cache": "broken"}},
        {**kivi, **rest, "kld_mean": 0.1, "bits": None, "key": {**kivi["key"], "cache": "odd"}},
        {**kivi, **rest, "kld_mean": 0.1, "key": {"kind": "text", "cache": "nameless"}},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for command in (
        ["report", str(path), "-o", str(tmp_path / "r.html")],
        ["plot", "frontier", str(path), "-o", str(tmp_path / "f")],
    ):
        assert cli.main(command) == 0
        err = capsys.readouterr().err
        assert "a row of broken is left out: kld_mean is nan" in err
        assert "a row of odd is left out: bits is None" in err
        assert "a row of nameless is left out: model is None" in err
        assert ("2 windows, texts or models are drawn in one figure" in err) == (command[0] == "plot")
    page = (tmp_path / "r.html").read_text()
    assert "kivi" in page
    assert "broken" not in page


def test_two_evaluations_do_not_share_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second one would remove the first one's distributions, and write each row twice."""
    rows, lock = folder / "rows.jsonl", folder / ".rows.jsonl.lock"
    command = f"eval -m {folder}/m.gguf -f {TEXT} -c 128 --chunks 1 --quiet --cache kivi -o {rows}"
    holder = (
        f"import time; from ggml_kvq import files\nwith files.alone({str(rows)!r}, 'test'): print('held', flush=True);"
        " time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        capsys.readouterr()
        code = cli.main(command.split())
        other.kill()
        err = capsys.readouterr().err
        assert code == 2
        assert f"being written by another ggml-kvq eval (process {other.pid}); wait for it" in err, err
        assert err.count("\n") == 1
        assert not rows.exists()
    assert lock.exists()  # of a killed process: nobody waits for it
    assert cli.main(command.split()) == 0
    assert len(results.read(rows)) == 2
    assert not lock.exists()
    assert not list(folder.glob("*.base"))


def test_eval_measures_no_cache_that_lacks_its_means(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them auto at 3 bits had 0.18 in place of 0.05, in a row that did not tell."""
    monkeypatch.setenv("KVQ_CACHE_DIR", "/proc/nope")
    config, why = default_means.ensure(demo_model, print)
    assert config is None and "KVQ_CACHE_DIR" in why
    with pytest.raises(KvqError, match="goes with coordinates of keys and values.*KVQ_CACHE_DIR"):
        specs.parse("auto:bits=3").means(demo_model)
    assert specs.parse("auto:bits=3,means=off").means(demo_model) is None


def test_the_doctor_looks_at_the_cache_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVQ_CACHE_DIR", "/proc/nope")
    cli.main(["doctor"])
    assert "note  cache folder" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--kv-bits", "--kv-budget", "--kv-config", "--kv-stats-file", "--kv-method-draft"])
def test_an_empty_value_is_refused(flag: str, demo_model: Path) -> None:
    """As of a variable that is not set: it meant llama.cpp's own cache, without a line."""
    for argv in ([flag, ""], [f"{flag}="], [flag, " "]):
        with pytest.raises(KvqError, match=f"{flag} has an empty value"):
            launcher.command("llama-cli", ["-m", str(demo_model), "--kv-method", "kivi", *argv], {})


def test_bits_are_said_once(demo_model: Path) -> None:
    argv = ["-m", str(demo_model), "-c", "4096", "--kv-budget", "5M"]
    with pytest.raises(KvqError, match="--kv-budget 5M and --kv-opt bits=3 both say"):
        launcher.command("llama-cli", [*argv, "--kv-opt", "bits=3"], {})
    notes = launcher.command("llama-cli", [*argv, "--kv-bits", "2.5"], {}).notes
    assert any("2.5 are taken, as --kv-bits says" in note for note in notes), notes


def test_a_generator_that_another_one_overtook_says_so(demo_model: Path) -> None:
    """The newer one had ended: the older one took that for its own end."""
    with Model(demo_model, "kivi", n_ctx=256, n_threads=1) as m:
        old = m.generate("The file", max_tokens=20, temperature=0)
        next(old)
        "".join(m.generate("Another", max_tokens=2, temperature=0))
        with pytest.raises(errors.BusyError, match="stale"):
            "".join(old)
        assert m.finish_reason == "length"


def test_tuning_that_cannot_begin_leaves_nothing(folder: Path) -> None:
    assert cli.main(["tune", "-m", str(folder / "m.gguf"), "-f", str(folder / "t.txt")]) == 2
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize(
    "argv",
    [
        lambda d: ["eval", "-m", os.fsencode(d) + b"/b\xff.gguf", "-f", TEXT, "-c", "256"],
        lambda d: ["info", os.fsencode(d / "m.gguf"), "--cache", b"kivi:bits=\xff"],
    ],
)
def test_names_that_are_no_text(argv: Callable[[Path], list[Any]], folder: Path) -> None:
    shutil.copy(os.fsencode(folder / "m.gguf"), os.fsencode(folder) + b"/b\xff.gguf")
    done = run_python(CLI, *argv(folder), check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr


def test_what_a_budget_names_as_enough_is_enough(demo_model: Path) -> None:
    """The plan had no means in it, the cache had: the size and the context that were named were refused."""
    argv = ["-m", str(demo_model), "-c", "512", "--kv-budget"]
    with pytest.raises(KvqError, match="give at least ") as refused:
        launcher.command("llama-cli", [*argv, "700K"], {})
    size = str(refused.value).split("give at least ")[1].split(" (")[0].replace(" ", "")
    with Model(demo_model, kv_budget=size, n_ctx=512, n_threads=1) as m:
        assert m.kv_stats()["bytes_total"] <= int(size.removesuffix("KiB")) * 1024
    found = re.search(r"-c (\d+)", str(refused.value))
    if found:
        with Model(demo_model, kv_budget="700K", n_ctx=int(found[1]), n_threads=1) as m:
            assert m.kv_stats()["bytes_total"] <= 700 * 1024


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
@pytest.mark.parametrize("command", ["calibrate", "calibrate --method xquant", "calibrate --predictor k", "tune"])
def test_data_are_not_fitted_on_another_encoding(
    command: str, encoding: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """UTF-16 came in as U+FFFD and zeros, and the means of those were written without a word."""
    text = folder / "utf16.txt"
    text.write_bytes(("Some words of a text. " * 2000).encode(encoding))
    out = folder / "out.gguf"
    argv = [*command.split(), "-m", str(folder / "m.gguf"), "-f", str(text), "-o", str(out)]
    few = [] if "xquant" in command else ["--sequences", "1"]
    assert cli.main([*argv, *few, "--length", "384"]) == 2
    assert f"-f {text} is no text in UTF-8" in capsys.readouterr().err
    assert not out.exists()
