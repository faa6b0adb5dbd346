"""What a new user meets in the first ten minutes: what commands print, in which order, and what they refuse."""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, run_python
from ggml_kvq import cli, default_means, progress
from ggml_kvq.calibrate import capture, files, halves, means, predictors, tune
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
    code = "import sys; from ggml_kvq.launch import launcher; sys.exit(launcher.llama_completion())"
    call = [sys.executable, "-c", code, *argv, "-c", "1024", "-no-cnv", "-t", "1"]
    text = subprocess.run(call, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=120, check=True).stdout
    both = subprocess.run(call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120, check=True).stdout
    written = text.decode().rstrip()
    said = both.decode().rstrip()
    assert said.splitlines()[-1].startswith(f"ggml-kvq: {method}: "), said[-500:]
    assert written[-60:] in said.rpartition("\nggml-kvq: ")[0]
    assert said.count(f"ggml-kvq: {method}: ") == 1


# ------------------------------------------------------------------ long runs


@pytest.fixture
def tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`ggml-kvq tune` of the demo model with few measurements."""
    monkeypatch.setattr(tune, "MEASURED", {"": (2,), "k": (1,), "v": (1,)})
    monkeypatch.setattr(tune, "SHOWN", (3.0,))
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "README.md").read_text() * 2)
    return ["tune", "-m", str(DEMO), "-f", str(text), "-o", str(tmp_path / "t.kvq.gguf"), "--sequences", "1",
            "--length", "512", "-t", "1"]  # fmt: skip


def stopped_at(n: int, monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """divergence() of a tuning that Ctrl-C ends at its n-th measurement; what it was before."""
    measure, calls = tune._Bench.divergence, [0]

    def stop(self: tune._Bench, opts: dict[str, Any]) -> float:
        calls[0] += 1
        if calls[0] == n:
            raise KeyboardInterrupt
        return measure(self, opts)

    monkeypatch.setattr(tune._Bench, "divergence", stop)
    return measure


def test_a_tuning_that_goes_on_keeps_its_halves_and_counts_what_is_left(
    tuning: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With another number of threads the halves of keys came out otherwise: 131 runs were lost. And what was done
    before counted as done in no time: "0 s left" with 68 runs to go.
    """
    measure = stopped_at(4, monkeypatch)
    assert cli.main(tuning) == 130
    monkeypatch.setattr(tune._Bench, "divergence", measure)
    monkeypatch.setattr(halves, "losses", lambda *_, **__: {"none": 0.1, "norm": 2.0})
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    capsys.readouterr()
    assert stopped_at(6, monkeypatch) is measure and cli.main(tuning) == 130
    got = capsys.readouterr()
    (total,) = re.findall(r"tuning: (\d+) runs over 1 x 512 tokens \(3 done before\), about ", got.out)
    monkeypatch.setattr(tune._Bench, "divergence", measure)
    monkeypatch.setattr(progress, "span", lambda seconds: f"{seconds:.6f} s")
    assert cli.main(tuning) == 0
    got = capsys.readouterr()
    assert f"tuning: {total} runs over 1 x 512 tokens (5 done before)" in got.out
    left = [float(x) for x in re.findall(r"tuning: \d+/12, about (\S+) s left", got.err)]
    assert left[0] == left[3] > left[-1] > 0 and len(left) == 12, got.err  # the mixture is measured last
    assert "bits at 131072 tokens" in got.out and "window not counted" not in got.out
    assert "-f ANOTHER.txt  # a text that was not tuned on\n" in got.out
    assert not list(tmp_path.glob("*.partial"))


TWICE = """
import os, signal, sys, time
from ggml_kvq import cli
from ggml_kvq.calibrate import halves
def twice(*_):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    except KeyboardInterrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        raise
halves._logits = twice
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", ["tune", "calibrate"])
def test_a_stop_while_halves_are_compared_leaves_nothing(command: str, tuning: list[str], tmp_path: Path) -> None:
    """timeout(1) sends SIGTERM twice; the second one ended the process with its file in /tmp."""
    (tmp_path / "kvq-halves-99999999-x").mkdir()  # of a process that is gone
    done = run_python(TWICE, command, *tuning[1:], env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 143 and f"ggml-kvq {command}: stopped; the same command goes on" in done.stderr
    assert command == "tune" or not list(tmp_path.glob("kvq-halves-*"))
    # what lies in the folder of a tuning is used by the run that goes on
    assert len(list(tmp_path.glob("*/means.kvq.gguf"))) == (command == "tune")


def test_a_second_sigterm_ends_a_command_that_hangs() -> None:
    code = (
        "import os, signal, time\nfrom ggml_kvq import cli\ncli.ONE_SIGNAL = 0.2\nwith cli.termination():\n"
        "    try: os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)\n"
        "    except cli.Terminated: os.kill(os.getpid(), signal.SIGTERM); print('unwound', flush=True)\n"
        "    time.sleep(0.3); os.kill(os.getpid(), signal.SIGTERM); time.sleep(5); print('never')\n"
    )
    done = run_python(code)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "unwound\n"), done.stderr


def test_calibrate_proposes_another_text(sidecar: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It proposed to evaluate on the text that it had just calibrated on."""
    said = calibrate.next_commands(Namespace(method="aqua", file="calib.txt", coords=0), DEMO, sidecar)
    assert "-f ANOTHER.txt  # a text that was not calibrated on\n" in said and "calib.txt" not in said


def test_eval_says_at_its_start_what_it_will_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An hour, and a file of 4.3 GB in the current folder, came without a word."""
    text, out = tmp_path / "text.txt", tmp_path / "out.jsonl"
    text.write_text((ROOT / "README.md").read_text())
    argv = ["eval", "-m", str(DEMO), "--cache", "kivi", "-f", str(text), "-c", "256", "--chunks", "2", "-o", str(out)]
    assert cli.main(argv) == 0
    said = capsys.readouterr().err
    found = re.match(
        r"ggml-kvq eval: 2 windows of 256 tokens, 2 caches. Distributions of f16 take (\d+) KiB in (\S+\.base) until"
        r" the end; --chunks N reads fewer windows\nggml-kvq eval: about \d+ s on this machine\n",
        said,
    )
    assert found and Path(found[2]).parent == tmp_path and int(found[1]) == pytest.approx(2 * 127 * 16, rel=0.02), said
    with progress.Bar("work", 4) as bar:
        bar._start -= 30
        bar(1)
    assert re.search(r"work: 1 of 4 \(30 s, about 90 s left\)", capsys.readouterr().err)


# ------------------------------------------------------------------ the first use


def test_progress_of_a_short_wait_comes_every_five_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """First use with one thread said 10 %, and then nothing for 35 seconds."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    line, said = progress.Line(), []
    for second in range(1000):
        now[0] = float(second)
        line(str(second))
        if capsys.readouterr().err:
            said.append(second)
    gaps = [b - a for a, b in itertools.pairwise(said)]
    assert max(gaps[:10]) <= 10 and max(gaps) <= 31 and len(said) < 70


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_use_that_is_stopped_says_so(number: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom ggml_kvq.launch import launcher\nfrom ggml_kvq.calibrate import halves\n"
        f"halves._open = lambda *a: os.kill(os.getpid(), {int(number)}) or __import__('time').sleep(5)\n"
        "sys.exit(launcher.llama_completion())"
    )
    env = {"KVQ_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    done = run_python(f"import sys\nsys.argv[1:] = ['-m', {str(DEMO)!r}, '--kv-bits', '3', '-t', '1']\n{code}", env=env)
    assert done.returncode == (130 if number == signal.SIGINT else -number)
    assert done.stderr.splitlines()[-1] == "llama-completion: stopped: nothing was kept"
    assert not list(tmp_path.rglob("*.gguf"))


def test_a_damaged_file_is_no_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_CACHE_DIR", str(tmp_path))
    there = default_means.path_of(DEMO)
    there.parent.mkdir(parents=True)
    there.write_bytes(b"GGUF")
    said: list[str] = []
    monkeypatch.setattr(means, "fit", lambda *_, **__: means.Means())
    default_means.ensure(DEMO, said.append, 1)
    assert said[0].endswith("it is measured again") and said[1].startswith(
        f"{DEMO.name}: measuring its keys and values, again"
    )
    there.unlink(missing_ok=True)
    default_means.ensure(DEMO, said.append, 1)
    assert any(line.startswith(f"first use of {DEMO.name}: measuring") for line in said)
