"""What a user reads: advice that fits the caller, repr, typed errors, progress, completion, doctor, models by name."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import LLAMA_FIELDS, run_python
from ggml_kvq import Model, _paths, cli, errors, hub, methods, progress, sidecars
from ggml_kvq.commands import completion
from ggml_kvq.errors import ArgumentTypeError, TextError
from ggml_kvq.launch import hub_args, launcher

ROOT = Path(__file__).resolve().parent.parent
CLI = "import sys; from ggml_kvq.cli import main; sys.exit(main(sys.argv[1:]))"

# ------------------------------------------------------------------ Model


def test_repr_says_what_it_is(demo_model: Path) -> None:
    with Model(demo_model, "kivi", {"bits": 2}, n_ctx="1k") as m:
        list(m.feed(m.tokenize("The file")))
        assert repr(m) == f"<Model {demo_model.name} kv_method=kivi [bits=2] n_ctx=1024, {len(m.tokens)} tokens held>"
    assert repr(m) == f"<Model {demo_model.name} (closed)>"


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"kv_opts": ["bits=2"]}, ["kv_opts=['bits=2']", "list", "dict"]),
        ({"kv_method": 3}, ["kv_method=3", "int"]),
        ({"n_ctx": "2kk"}, ["n_ctx='2kk'", "'32k'"]),
        ({"n_ctx": 512.0}, ["n_ctx=512.0", "float"]),
        ({"n_ctx": True}, ["n_ctx=True", "bool"]),
        ({"n_ubatch": None}, ["n_ubatch=None", "NoneType"]),
        ({"path": b"model.gguf"}, ["path=b'model.gguf'", "bytes"]),
        ({"path": 7}, ["path=7", "int"]),
        ({"kv_method": "kivi", "kv_config": 7}, ["kv_config=7", "int"]),
    ],
)
def test_wrong_types_are_type_errors_of_one_line(demo_model: Path, kwargs: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ArgumentTypeError) as e:
        Model(**{"path": demo_model, **kwargs})
    assert isinstance(e.value, TypeError) and isinstance(e.value, errors.KvqError)
    assert "\n" not in str(e.value) and all(w in str(e.value) for w in words), str(e.value)


def test_texts_that_have_no_bytes(demo_model: Path) -> None:
    with Model(demo_model, "none", n_ctx=256) as m:
        for prompt in (b"The file", bytearray(b"x"), [1.5], 3, ["a"]):
            with pytest.raises(ArgumentTypeError):
                m.generate(prompt)  # type: ignore[arg-type]
        with pytest.raises(TextError, match=r"lone surrogate at position 4 .*errors='replace'"):
            m.generate("The \udc80 file")
        with pytest.raises(errors.ModelError, match="n_ctx=99999999999 is too large"):
            Model(demo_model, n_ctx=99999999999)


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "python/ggml_kvq/py.typed").is_file()
    assert not re.search(r"exclude.*typed", (ROOT / "pyproject.toml").read_text())


# ------------------------------------------------------------------ data beside the model


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> tuple[Path, str]:
    """A model with data beside it, and what calibrate printed."""
    folder = tmp_path_factory.mktemp("calibrated")
    model = folder / "demo.gguf"
    model.symlink_to(demo_model)
    (folder / "t.txt").write_text((ROOT / "examples/prompt.txt").read_text() * 4)
    argv = ["calibrate", "-m", str(model), "-f", str(folder / "t.txt"), "--sequences", "4", "--length", "128"]
    done = run_python(CLI, *argv)
    assert done.returncode == 0, done.stderr
    assert "\r" not in done.stderr and "calibrating: 1/4 sequences" in done.stderr  # no terminal: lines
    return model, done.stdout


def test_data_beside_the_model_is_found(calibrated: tuple[Path, str]) -> None:
    model, _ = calibrated
    there = sidecars.default_path(model)
    got = launcher.command("llama-cli", ["-m", str(model), "--kv-method", "aqua"], {})
    assert got.env["KVQ_CONFIG"] == there and there in got.notes[0]
    for argv in ([], ["--kv-method", "kivi"]):  # data chooses no method, and belongs to one
        assert not launcher.command("llama-cli", ["-m", str(model), *argv], {}).env.get("KVQ_CONFIG")
    with Model(model, "aqua", n_ctx=256) as m:
        assert m.load_line.startswith("ggml-kvq: aqua [sinks=4,predictor=bias") or "predictor=bias" in m.load_line
    with pytest.raises(errors.MethodError):
        Model(model, "aqua", kv_config="none", n_ctx=256)


def test_embedded_data_comes_before_data_beside(write_gguf: Callable[..., Path]) -> None:
    def data(model: Path, method: str) -> str | None:
        return launcher.command("llama-cli", ["-m", str(model), "--kv-method", method], {}).env["KVQ_CONFIG"]

    model = write_gguf("m.gguf", {**LLAMA_FIELDS, "kvq.method": "kivi", "kvq.version": 1})
    write_gguf("m.kvq.gguf", {"general.type": "kvq", "kvq.method": "kivi", "kvq.version": 1})
    assert data(model, "kivi") is None
    plain = write_gguf("p.gguf", LLAMA_FIELDS)
    write_gguf("p.kvq.gguf", {"general.type": "kvq", "kvq.method": "kivi", "kvq.version": 1})
    assert data(plain, "kivi") == str(plain.with_name("p.kvq.gguf")) and data(plain, "aqua") is None


def test_calibrate_ends_with_the_next_commands(calibrated: tuple[Path, str]) -> None:
    model, out = calibrated
    lines = [line.removeprefix("next:").strip() for line in out.splitlines()[-3:]]
    assert lines[0] == f"llama-cli -m {model} --kv-method aqua"
    for line in lines[1:]:
        cli.build_parser().parse_args(line.partition("  # ")[0].split()[1:])
    assert lines[1].startswith("ggml-kvq eval") and lines[2].startswith("ggml-kvq embed")


def test_advice_about_data_fits_the_caller(demo_model: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.MethodError, match=r"kv_config='FILE\.gguf'.*kv_opts=\{'predictor': 'none'\}"):
        Model(demo_model, "aqua", n_ctx=256)
    text = tmp_path / "t.txt"
    text.write_text((ROOT / "examples/prompt.txt").read_text() * 2)
    done = run_python(
        CLI,
        "eval",
        "-m",
        str(demo_model),
        "-f",
        str(text),
        "-c",
        "256",
        "--chunks",
        "1",
        "--cache",
        "aqua",
        "-o",
        str(tmp_path / "r.jsonl"),
    )
    assert "aqua@FILE.gguf" in done.stdout and "aqua:predictor=none" in done.stdout and "--kv-config" not in done.stdout
    assert done.returncode == 1  # everything that was asked for was refused
    call = "import sys; from ggml_kvq.launch.launcher import run; sys.exit(run('llama-completion', sys.argv[1:]))"
    argv = ["-m", str(demo_model), "-c", "256", "-n", "1", "-p", "x", "-no-cnv"]
    assert "--kv-config" in run_python(call, *argv, "--kv-method", "aqua", stdin=subprocess.DEVNULL).stderr
    env = {**os.environ, "GGML_BACKEND_PATH": str(_paths.backend()), "KVQ_METHOD": "aqua"}
    own = subprocess.run(
        [str(_paths.program("llama-completion")), *argv, "-dev", "KVQ0"],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (
        "KVQ_CONFIG=FILE.gguf" in own.stderr
        and "KVQ_OPTS=predictor=none" in own.stderr
        and "--kv-config" not in own.stderr
    )


# ------------------------------------------------------------------ info


def test_info_hides_arrays_and_plans_caches(
    write_gguf: Callable[..., Path], capsys: pytest.CaptureFixture[str], demo_model: Path
) -> None:
    path = write_gguf("m.gguf", {**LLAMA_FIELDS, "kvq.method": "kivi", "kvq.blob": list(range(900))})
    for argv in ([], ["--json"]):
        assert cli.main(["info", str(path), *argv]) == 0
        out = capsys.readouterr().out
        assert "[900 values]" in out and len(out) < 4000
    assert (
        cli.main(["info", str(demo_model), "-c", "32k", "--cache", "kivi:bits=2", "--cache", "upstream:q4_0", "--json"])
        == 0
    )
    got = json.loads(capsys.readouterr().out)
    ours, theirs = got["methods"]
    assert got["n_ctx"] == 32768 and ours["method"] == "kivi:bits=2" and theirs["bits"] == 4.5
    assert theirs["bytes_total"] == 12 * 32768 * 2 * 128 * 4.5 / 8
    assert cli.main(["info", str(demo_model), "--cache", "kivi:bits=9"]) == 2
    with pytest.raises(SystemExit):
        cli.main(["info", str(demo_model), "-c", "2kk"])


# ------------------------------------------------------------------ progress, interruption


def test_progress_without_a_terminal_or_tqdm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.Bar("kivi text", 3) as bar:
        for _ in range(3):
            bar(1)
    assert capsys.readouterr().err == "kivi text: 3 of 3 (0 s)\n"
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    importlib.reload(progress)
    with progress.Bar("kivi text", 1) as bar:
        bar(1)
    assert terminal.getvalue() == "kivi text: 1 of 1 (0 s)\n"


def test_ctrl_c_says_how_to_go_on(demo_model: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "t.txt", tmp_path / "r.jsonl"
    text.write_text((ROOT / "examples/prompt.txt").read_text() * 40)
    argv = [
        sys.executable,
        "-c",
        CLI,
        "eval",
        "-m",
        str(demo_model),
        "-f",
        str(text),
        "-c",
        "512",
        "-ub",
        "32",
        "-t",
        "1",
        "-o",
        str(out),
        "--cache",
        "kivi",
    ]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(4)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in err
    assert "stopped; rows that were finished are in the output file: the same command goes on" in err


# ------------------------------------------------------------------ doctor, completion


def test_doctor(demo_model: Path, tmp_path: Path) -> None:
    done = run_python(CLI, "doctor", "-m", str(demo_model))
    assert done.returncode == 0 and "ggml-kvq: kivi" in done.stdout and "KVQ0" in done.stdout, done.stdout
    done = run_python(CLI, "doctor", env={"KVQ_METHOD": "kivy", "GGML_BACKEND_PATH": "/nowhere.so"})
    bad = [line for line in done.stdout.splitlines() if line.startswith("BAD")]
    assert done.returncode == 1 and len(bad) == 2 and "/nowhere.so" in bad[0] and "kivy" in bad[1], done.stdout
    done = run_python(CLI, "doctor", env={"KVQ_LIB_DIR": str(tmp_path)})
    assert (
        done.returncode == 1
        and str(tmp_path) in done.stdout
        and "reinstall" in done.stdout
        and "Traceback" not in done.stderr
    )
    done = run_python(CLI, "doctor", "-m", "/nowhere.gguf")
    assert done.returncode == 1 and "/nowhere.gguf" in done.stdout


COMPLETED = [
    ("ggml-kvq cal", "calibrate"),
    ("ggml-kvq methods xq", "xquant"),
    ("ggml-kvq calibrate --predictor fu", "full"),
    ("ggml-kvq eval --cac", "--cache"),
    ("llama-cli --kv-method xq", "xquant"),
    ("llama-server --kv-st", "--kv-stats-file"),
    ("llama-cli --kv-method kivi --kv-opt bit", "bits="),
    ("llama-cli --kv-method no", "none"),
]


@pytest.mark.parametrize(("words", "expected"), COMPLETED)
def test_completion(words: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"]) == 0
    script = tmp_path / "completion.sh"
    script.write_text(capsys.readouterr().out)
    function = "_ggml_kvq" if words.startswith("ggml-kvq") else "_ggml_kvq_launcher"
    code = (
        f'. "$1"; complete -p {words.split()[0]} | grep -q {function} || exit 3; COMP_WORDS=({words});'
        f' COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); {function}; echo "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(
        ["bash", "-c", code, "bash", str(script)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == [expected], done.stderr


def test_completion_for_fish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What fish completes after the same words. Where there is no fish, the lines that make it do so are looked at."""
    assert cli.main(["completion", "fish"]) == 0
    text = capsys.readouterr().out
    names = " ".join(row["name"] for row in methods.table())
    for line in (
        "complete -c ggml-kvq -n '__fish_use_subcommand' -f -a '" + " ".join(completion.subcommands()) + "'",
        f"complete -c ggml-kvq -n '__fish_seen_subcommand_from methods' -f -a '{names}'",
        "complete -c ggml-kvq -n '__fish_seen_subcommand_from eval' -l cache -x -a"
        f" 'f16 upstream:q8_0 upstream:q4_0 {names}'",
        f"complete -c llama-cli -l kv-method -x -a '{names} none'",
        "complete -c llama-server -l kv-stats-file -r",
        "complete -c llama-cli -l kv-opt -x -a '(__ggml_kvq_options)'",
    ):
        assert line in text.splitlines()
    for row in methods.table():  # the options of every method
        keys = " ".join(o["key"] + "=" for o in row["options"])
        assert not keys or f"        case {row['name']}\n            string split ' ' '{keys}'\n" in text
    assert not [line for line in text.splitlines() if line.count("'") % 2]
    fish = shutil.which("fish")
    for words, expected in COMPLETED if fish else ():
        script = tmp_path / "completion.fish"
        script.write_text(text)
        code = f'source {script}; complete -C "{words}"'
        done = subprocess.run(
            [str(fish), "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env={**os.environ, "HOME": str(tmp_path)},
        )
        assert expected in [line.split("\t")[0] for line in done.stdout.splitlines()], (words, done)


# ------------------------------------------------------------------ models by name


def test_models_of_the_hub(monkeypatch: pytest.MonkeyPatch, write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    files = [
        "a-Q4_K_M.gguf",
        "a-Q8_0.gguf",
        "big-Q6_K-00001-of-00002.gguf",
        "big-Q6_K-00002-of-00002.gguf",
        "mmproj-a.gguf",
        "README.md",
    ]
    fetched: list[str] = []

    def fetch(spec: str, **_: object) -> Path:
        fetched.append(spec)
        return write_gguf(spec.rsplit("/", 1)[1], LLAMA_FIELDS)

    monkeypatch.setattr(hub, "_files", lambda repo, token: sorted(f for f in files if f.endswith(".gguf")))
    monkeypatch.setattr(hub, "fetch", fetch)

    def args(program: str, *argv: str, env: dict[str, str] | None = None) -> list[str]:
        fetched.clear()
        return hub_args.resolve(program, argv, env or {})[0]

    assert args("llama-cli", "-n", "1", "-hf", "o/r")[:4] == ["-n", "1", "-m", str(tmp_path / "a-Q4_K_M.gguf")]
    assert fetched == ["hf:o/r/a-Q4_K_M.gguf", "hf:o/r/mmproj-a.gguf"]
    assert args("llama-completion", "-hf", "o/r:q8_0") == ["-m", str(tmp_path / "a-Q8_0.gguf")] and len(fetched) == 1
    assert (
        args("llama-bench", "-hf", "o/r:Q6_K") == ["-m", str(tmp_path / "big-Q6_K-00001-of-00002.gguf")]
        and len(fetched) == 2
    )
    assert args("llama-cli", "-hf", "o/r", "-hff", "a-Q8_0.gguf", "--no-mmproj")[-1].endswith("a-Q8_0.gguf")
    assert args("llama-cli", "-m", "hf:o/r/a-Q8_0.gguf") == ["-m", str(tmp_path / "a-Q8_0.gguf")]
    assert args("llama-cli", env={"LLAMA_ARG_HF_REPO": "o/r", "LLAMA_ARG_NO_MMPROJ": "1"})[:1] == ["-m"]
    assert hub_args.resolve("llama-cli", [], {"LLAMA_ARG_HF_REPO": "o/r"})[1] == {"LLAMA_ARG_HF_REPO": None}
    for argv, word in (
        (["-hf", "o/r:Q2_K"], "no GGUF file of Q2_K; it has a-Q4_K_M.gguf"),
        (["-hf", "o"], "write -hf owner/repo"),
        (["-hf", "o/r", "-m", "x"], "drop one"),
    ):
        with pytest.raises(errors.KvqError, match=re.escape(word)):
            args("llama-cli", *argv)
    got = launcher.command("llama-cli", ["-hf", "o/r:Q8_0", "--no-mmproj", "--kv-method", "kivi"], {})
    assert got.env["KVQ_MODEL"] == str(tmp_path / "a-Q8_0.gguf")


def test_arguments_of_calls_are_checked(demo_model: Path) -> None:
    """llama.cpp ends the process at a token that the model does not have."""
    with Model(demo_model, "none", n_ctx=256) as m:
        for call in (
            lambda: m.detokenize([10**9]),
            lambda: m.detokenize([-1]),
            lambda: m.piece(m.n_vocab),
            lambda: m.generate([m.n_vocab]),
        ):
            with pytest.raises(errors.DecodeError, match="outside the vocabulary of 8192"):
                call()
        bad: Any = m  # wrong types on purpose
        refused: tuple[tuple[Callable[[], object], str], ...] = (
            (lambda: bad.generate("x", max_tokens="3"), "max_tokens='3'"),
            (lambda: bad.generate("x", stop=[3]), "3 is a int"),
            (lambda: bad.generate("x", temperature="hot"), "temperature='hot'"),
            (lambda: bad.generate("x", top_k=2.5), "top_k=2.5"),
            (lambda: bad.detokenize("abc"), "'abc' is a text"),
            (lambda: bad.logits("abc"), "'abc' is a text"),
            (lambda: bad.chat_prompt("hi"), "messages='hi'"),
        )
        for attempt, word in refused:
            with pytest.raises(errors.KvqError, match=re.escape(word)):
                attempt()
    for kwargs, word in (
        ({"device": 5}, "device=5"),
        ({"n_threads": 0}, "n_threads=0"),
        ({"n_threads": "x"}, "n_threads='x'"),
        ({"n_gpu_layers": "x"}, "n_gpu_layers"),
    ):
        with pytest.raises(errors.KvqError, match=re.escape(word)):
            Model(demo_model, **kwargs)
