"""What a new user meets in the first ten minutes: what commands print, in which order, and what they refuse."""

from __future__ import annotations

import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from ggml_kvq import cli, progress
from ggml_kvq.calibrate import capture, files, means, predictors
from ggml_kvq.commands import calibrate
from ggml_kvq.errors import KvqError

DEMO = ROOT / "models/kvq-demo-q8_0.gguf"


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sidecar") / "model.kvq.gguf"
    fitted = means.fit(DEMO, (ROOT / "README.md").read_text(), n_sequences=1, length=256, n_threads=1)
    files.write_sidecar(out, files.fields(DEMO, fitted, 4), files.arrays(fitted))
    return out


def test_info_of_a_sidecar_begins_with_what_it_chooses(sidecar: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """110 lines of figures by layer came before it."""
    assert cli.main(["info", str(sidecar)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 32, "\n".join(lines)
    assert any("this file chooses aqua" in line for line in lines[:8])
    assert any("kvq.aqua.blk.N.k.rms" in line and "of 12 layers, 0 to 11" in line for line in lines)
    assert cli.main(["info", str(sidecar), "--json"]) == 0
    assert '"kvq.aqua.blk.11.k.rms"' in capsys.readouterr().out


def test_calibrate_says_nothing_of_values_that_it_does_not_predict(capsys: pytest.CaptureFixture[str]) -> None:
    """`V explained 0.0%` stood behind every layer."""
    layer = predictors.Layer((np.zeros(1), np.zeros(1)), prev=0, explained=[0.5, 0.25], gain={2: [0.4, 0.2]})
    for predictor, has in (("k", False), ("full", True)):
        calibrate.print_fit(predictors.Fit(predictor=predictor, format="f16", layers={1: layer}))
        said = capsys.readouterr().out
        assert "50.0%" in said and ("V explained" in said) is has and ("25.0%" in said) is has
        assert ("values: their means alone are taken off" in said) is not has


def test_embed_shows_how_far_it_is_and_replaces_nothing_unasked(
    sidecar: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    out = tmp_path / "out.gguf"
    argv = ["embed", str(DEMO), str(sidecar), str(out)]
    assert cli.main(argv) == 0
    said = capsys.readouterr().err
    assert f"copying {DEMO.name}: 100 % of" in said and said.count("copying") > 10
    before = out.stat()
    assert cli.main(argv) != 0
    assert "is there already; choose another name, or add --overwrite" in capsys.readouterr().err
    assert out.stat().st_mtime_ns == before.st_mtime_ns
    assert cli.main([*argv, "--overwrite"]) == 0 and out.stat().st_mtime_ns != before.st_mtime_ns


def test_every_command_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    """embed and report had no description."""
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    commands = re.findall(r"^    (\w+)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
    assert {"embed", "report", "calibrate", "completion", "tune"} <= set(commands)
    for command in commands:
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        said = capsys.readouterr().out.split("\n\n")[1]
        assert len(said.split()) > 3 and not said.startswith(("positional", "options")), command


def test_a_short_text_is_told_how_many_sequences_it_holds() -> None:
    """ "lower --sequences" did not say to what."""

    class Words:
        def tokenize(self, text: str) -> list[int]:
            return list(range(len(text)))

    with pytest.raises(KvqError, match="or lower --sequences to 3$"):
        capture.sequences(Words(), "x" * 350, 64, 100, 0)  # type: ignore[arg-type]
    assert len(capture.sequences(Words(), "x" * 350, 3, 100, 0)) == 3  # type: ignore[arg-type]
    with pytest.raises(KvqError, match="or lower --length to 90 and --sequences to 1$"):
        capture.sequences(Words(), "x" * 90, 64, 100, 0)  # type: ignore[arg-type]
    assert len(capture.sequences(Words(), "x" * 90, 1, 90, 0)) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(("length", "works"), [(128, False), (256, False), (384, True), (1024, True), (None, True)])
def test_xquant_says_why_a_window_is_too_short(length: int | None, works: bool) -> None:
    """It ran the f16 cache first, then refused 128 and 256 tokens."""
    given = Namespace(**dict.fromkeys(calibrate.DEFAULTS), method="xquant", file="text", work=None, hf=None)
    given.length = length
    if works:
        calibrate.settle(given)
        return
    with pytest.raises(KvqError, match=f"--length {length}: xquant keeps the newest 128 tokens.*give --length 384"):
        calibrate.settle(given)


@pytest.mark.parametrize("method", ["kivi", "f16"])
def test_the_closing_line_stands_behind_the_text(method: str) -> None:
    """With 2>&1 it landed in the middle of the generated text."""
    argv = ["-m", str(DEMO), "--kv-method", method, "-f", str(ROOT / "examples/prompt.txt"), "-n", "32", "--temp", "0"]
    code = "import sys; from ggml_kvq import launcher; sys.exit(launcher.llama_completion())"
    call = [sys.executable, "-c", code, *argv, "-c", "1024", "-no-cnv", "-t", "1"]
    text = subprocess.run(call, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=120, check=True).stdout
    both = subprocess.run(call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120, check=True).stdout
    written = text.decode().rstrip()
    said = both.decode().rstrip()
    assert said.splitlines()[-1].startswith(f"ggml-kvq: {method}: "), said[-500:]
    assert written[-60:] in said.rpartition("\nggml-kvq: ")[0]
    assert said.count(f"ggml-kvq: {method}: ") == 1
