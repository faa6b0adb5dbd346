"""What a second pass as a new user found: targets that are no files, closed outputs, wrong types, Ctrl-C while a model
loads, options given twice. Each of these was silent, a trace, a hang or a crash.
"""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ggml_kvq
import numpy as np
import pytest
from conftest import LLAMA_FIELDS, ROOT, run_python
from ggml_kvq import KvqError, Model, _paths, cli, files, hub, plotting, processes
from ggml_kvq.core import arguments, native
from ggml_kvq.gguf_header import GgufError
from ggml_kvq.gguf_header import read as read_header
from ggml_kvq.launch import hub_args, launcher

CLI = "import sys; from ggml_kvq.cli import main; sys.exit(main())"


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model(ROOT / "models" / "kvq-demo-q8_0.gguf", "kivi", n_ctx=256, n_threads=1) as m:
        yield m


# ------------------------------------------------------------------ devices, pipes, links


def _pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def test_no_file_is_put_in_the_place_of_a_pipe_or_device(model: Model, tmp_path: Path) -> None:
    """As root the rename worked: a state saved to /dev/null left a file there. A pipe stands for the device here."""
    pipe = _pipe(tmp_path / "pipe")
    with pytest.raises(ggml_kvq.StateError, match="is a device or a pipe"):
        model.save_state(pipe)
    with pytest.raises(KvqError, match="is a device or a pipe"), files.whole(pipe) as partial:
        partial.write_text("x")
    for words, argv, env in (
        ("--kv-stats-file", ["--kv-stats-file", str(pipe)], {}),
        ("KVQ_STATS_FILE", [], {"KVQ_STATS_FILE": str(pipe)}),
    ):
        with pytest.raises(KvqError, match=f"{words} .*pipe cannot be written"):
            launcher.command("llama-server", ["--kv-method", "f16", *argv], env)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pipe"]


def test_the_library_itself_leaves_a_pipe_alone(demo_model: Path, tmp_path: Path) -> None:
    """A program of one's own sets KVQ_STATS_FILE without a launcher."""
    pipe = _pipe(tmp_path / "pipe")
    argv = [_paths.program("llama-completion"), "-m", demo_model, "-dev", "KVQ0", "-fa", "on", "-p", "x", "-n", "2"]
    env = {"GGML_BACKEND_PATH": str(_paths.backend()), "KVQ_METHOD": "kivi", "KVQ_STATS_FILE": str(pipe)}
    done = subprocess.run(
        [*map(str, argv), "-no-cnv", "-t", "1", "-c", "256"], env={**os.environ, **env}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert "is a device or a pipe" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]


def test_a_file_is_written_where_a_link_points(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link.txt").symlink_to(tmp_path / "real" / "file.txt")
    with files.whole(tmp_path / "link.txt") as partial:
        partial.write_text("x")
    assert (tmp_path / "link.txt").is_symlink() and (tmp_path / "real" / "file.txt").read_text() == "x"


def test_a_folder_is_refused_before_the_work(tmp_path: Path) -> None:
    worked = False
    with pytest.raises(KvqError, match="Is a directory"), files.whole(tmp_path):
        worked = True
    assert not worked


def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    """open() of a pipe waits for a writer: `info` and the launchers hung."""
    pipe = _pipe(tmp_path / "model.gguf")
    with pytest.raises(GgufError, match="is a pipe"):
        read_header(pipe)
    with pytest.raises(KvqError, match="is no plain file"):
        launcher.command("llama-cli", ["-m", str(pipe), "--kv-method", "kivi"], {})


# ------------------------------------------------------------------ processes that were killed


def _dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_what_killed_processes_left_goes_with_the_next_writer(tmp_path: Path) -> None:
    """Up to gigabytes under hidden names, which nothing removed."""
    dead, folder = _dead_pid(), tmp_path / "sub"
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        left = [folder / f".k.1f.{dead}.part.base", tmp_path / f".k.1f.{dead}.part.base"]
        kept = [
            f".k.1f.{other.pid}.part.base",  # at work
            f".k.1f.{dead}.part.npz",
            f".k.{dead}.part.base",
            f".k.1f.0{dead}.part.base",
            f"k.1f.{dead}.part.base",
            f".k.1f.{dead}.part.base.bak",
        ]
        for path in (*left, *(folder / name for name in kept)):
            path.write_text("x")
        with files.whole(folder / "k.1f.base") as partial:
            partial.write_text("y")
            assert sorted(p.name for p in folder.iterdir()) == sorted([*kept, partial.name])
        other.communicate(b"\n")
    assert left[1].exists()  # not in this folder
    assert sorted(p.name for p in folder.iterdir()) == sorted([*kept, "k.1f.base"])


def test_a_leftover_that_somebody_holds_is_none(tmp_path: Path) -> None:
    """A number that does not live here may live on another machine, or in another container."""
    path = tmp_path / f".out.{_dead_pid()}.part"
    code = "import sys\nfrom pathlib import Path\nfrom ggml_kvq import files\nfiles._hold(Path(sys.argv[1]))\n"
    argv = [sys.executable, "-c", code + "print('held', flush=True)\ninput()", str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with files.whole(tmp_path / "out") as partial:
            partial.write_text("x")
        assert path.exists()
        other.communicate("\n")
    (tmp_path / f".out.{_dead_pid()}.part").symlink_to(tmp_path / "out")
    with files.whole(tmp_path / "out") as partial:
        partial.write_text("y")
    assert not path.exists() and (tmp_path / "out").read_text() == "y"
    assert len(list(tmp_path.iterdir())) == 2  # a link is nothing of ours


def test_writers_of_one_name_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Processes that remove the same leftovers at once, and threads, which have one number."""
    code = (
        "import sys, threading\nfrom pathlib import Path\nfrom ggml_kvq import files\nout = Path(sys.argv[1])\n"
        "def write():\n"
        "    for i in range(40):\n"
        "        out.with_name(f'.out.{sys.argv[2]}.part').touch()\n"
        "        with files.whole(out) as partial:\n            partial.write_text('x' * 5000)\n"
        "        assert len(out.read_text()) == 5000\n"
        "        done.append(i)\n"
        "done = []\nthreads = [threading.Thread(target=write) for _ in range(2)]\n"
        "[t.start() for t in threads]\n[t.join() for t in threads]\nassert len(done) == 80\n"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "out"), str(_dead_pid())]
    writers = [subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for writer in writers:
        assert (writer.communicate()[1], writer.returncode) == ("", 0)
    with files.whole(tmp_path / "out") as partial:
        partial.write_text("x")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_eval_that_is_terminated_or_killed(demo_model: Path, tmp_path: Path) -> None:
    """SIGTERM ended it as SIGKILL does; after either, files with the f16 base so far stayed."""
    (tmp_path / "text").write_text("The options are read from the file. " * 8000)
    argv = [sys.executable, "-c", CLI, "eval", "-m", str(demo_model), "-f", "text", "-c", "512", "-t", "1", "--quiet"]

    def ended_by(number: signal.Signals) -> tuple[int, str]:
        before = set(tmp_path.iterdir())
        with subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
            while not any(x.name.endswith(".part.base") and x.stat().st_size for x in set(tmp_path.iterdir()) - before):
                assert p.poll() is None, p.communicate()
                time.sleep(0.01)
            p.send_signal(number)
            return p.communicate()[1].count("\n"), str(p.returncode)

    assert ended_by(signal.SIGKILL) == (0, "-9")
    assert len([p for p in tmp_path.iterdir() if ".part." in p.name]) == 1
    assert ended_by(signal.SIGTERM) == (1, "143")
    assert [p.name for p in tmp_path.iterdir()] == ["text"]


def test_sigterm_waits_where_c_code_calls_python() -> None:
    got: list[str] = []
    with pytest.raises(cli.Terminated), cli.termination():
        with processes.interrupt_held():
            os.kill(os.getpid(), signal.SIGTERM)
            got.append("went on")
        got.append("not here")
    assert got == ["went on"] and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# ------------------------------------------------------------------ outputs that take nothing


@pytest.mark.parametrize("argv", [["methods"], ["--help"], ["--version"], ["methods", "kivi"]])
def test_a_full_disk_behind_the_output(argv: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", CLI, *argv], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2, done.stderr
    assert "the output could not be written: No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_bug_report_on_a_full_disk() -> None:
    with open("/dev/full", "w") as full:
        argv = [sys.executable, "-m", "ggml_kvq"]
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_closed_output() -> None:
    done = subprocess.run(
        ["sh", "-c", '"$0" -c "$1" methods >&-', sys.executable, CLI], stderr=subprocess.PIPE, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_output_of_few_letters(demo_model: Path, tmp_path: Path) -> None:
    there = tmp_path / "mödel.gguf"
    there.symlink_to(demo_model)
    done = run_python(CLI, "info", str(there), env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and "m\\xf6del.gguf" in done.stdout, done.stderr


# ------------------------------------------------------------------ the Python face

#: what is called with a wrong argument: `m` is a Model, typed Any since the types are wrong on purpose
WRONG: dict[str, Callable[[Any], Any]] = {
    "truncate text": lambda m: m.truncate("x"),
    "truncate fraction": lambda m: m.truncate(0.5),
    "truncate none": lambda m: m.truncate(None),
    "load number": lambda m: m.load_state(3),
    "load bytes": lambda m: m.load_state(b"x"),
    "save none": lambda m: m.save_state(None),
    "save nameless": lambda m: m.save_state(""),
    "save NUL": lambda m: m.save_state("a\0b"),
    "perplexity window": lambda m: m.perplexity("a " * 400, n_ctx=64.5),
    "perplexity stride": lambda m: m.perplexity("a " * 400, n_ctx=64, stride="x"),
    "perplexity ubatch": lambda m: m.perplexity("a " * 400, n_ctx=64, n_ubatch=0),
    "perplexity none": lambda m: m.perplexity(None),
    "perplexity bytes": lambda m: m.perplexity(b"abc" * 400, n_ctx=64),
    "generate two axes": lambda m: m.generate(np.array([[1, 2]])),
    "generate stop": lambda m: m.generate("a", stop=3),
    "generate sampling": lambda m: m.generate("a", sampling=3),
    "generate fewer than none": lambda m: m.generate("a", max_tokens=-2),
    "logits none": lambda m: m.logits(None),
    "logits number": lambda m: m.logits(3),
    "logits fractions": lambda m: m.logits([1.7, 2.2]),
    "logits fractions, array": lambda m: m.logits(np.array([1.7, 2.2])),
    "logits two axes": lambda m: m.logits([[1, 2], [3, 4]]),
    "logits truth": lambda m: m.logits([True]),
    "logits large": lambda m: m.logits([2**40]),
    "logits large, array": lambda m: m.logits(np.array([2**40])),
    "logits ubatch": lambda m: m.logits([1], n_ubatch="x"),
    "feed outputs": lambda m: list(m.feed([1, 2, 3], outputs=[True, False])),
    "feed outputs of one": lambda m: list(m.feed([1, 2, 3], outputs=[True])),
    "feed outputs, text": lambda m: list(m.feed([1, 2, 3], outputs="abc")),
    "detokenize number": lambda m: m.detokenize(3),
    "metadata number": lambda m: m.metadata(3),
    "metadata surrogate": lambda m: m.metadata("\udcff"),
    "chat none": lambda m: m.chat_prompt(None),
    "chat number": lambda m: m.chat_prompt([{"role": 3, "content": "x"}]),
    "copy": copy.copy,
    "deep copy": copy.deepcopy,
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments_are_one_line(model: Model, call: Callable[[Model], Any]) -> None:
    """Plain errors from the middle of numpy or ctypes, or a number that was quietly cut off."""
    with pytest.raises(KvqError) as e:
        call(model)
    assert "\n" not in str(e.value)


def test_right_arguments_still_pass(model: Model) -> None:
    loose: Any = model  # more than the types promise
    assert loose.detokenize(t for t in model.tokenize("the file")).strip() == "the file"
    assert model.logits(np.array([1, 2, 3], np.int64)).shape == (3, model.n_vocab)
    text = "the file is read " * 40
    assert loose.perplexity(text, n_ctx="32") == model.perplexity(text, n_ctx=32)
    assert sum(len(p) for p in model.feed([1, 2, 3], outputs=[0, 1, 1])) == 2
    assert loose.chat_prompt(m for m in [{"role": "user", "content": "x"}]) == "x"
    loose.truncate(np.int64(2))
    assert len(model.tokens) == 2


def test_open_refuses_what_it_did_not(demo_model: Path) -> None:
    with pytest.raises(ggml_kvq.MethodError, match="kv_config=/nowhere is not a file"):
        Model(demo_model, kv_config="/nowhere")
    with pytest.raises(ggml_kvq.MethodError, match="is no cache type"):
        Model(demo_model, type_k=[])  # type: ignore[arg-type]
    with pytest.raises(ggml_kvq.MethodError, match="bits=2 and bits=4 name one option twice"):
        Model(demo_model, "kivi", "bits=2,bits=4")
    with pytest.raises(ggml_kvq.MethodError, match=r"pass kv_config='FILE.gguf' .* or kv_opts=\{'near': 'higgs'\}"):
        Model(demo_model, "specache", "near=aqua", n_ctx=256)
    with pytest.raises(ggml_kvq.ModelError, match="n_batch=3 is less than n_seq_max=4; pass n_batch=4 or more"):
        Model(demo_model, n_batch=3, n_seq_max=4)  # llama.cpp ended the process


def test_a_closed_model_has_no_pieces(demo_model: Path) -> None:
    """piece() read the freed vocabulary: the process ended with signal 11."""
    code = (
        "import sys\nfrom ggml_kvq import Model, ModelError\n"
        "m = Model(sys.argv[1], n_ctx=256, n_threads=1)\nm.close()\n"
        "for call in (lambda: m.piece(1), lambda: m.detokenize([1]), lambda: m.metadata('general.name')):\n"
        "    try:\n        call()\n    except ModelError as e:\n        print('closed' in str(e))\n"
    )
    done = run_python(code, str(demo_model))
    assert (done.returncode, done.stdout) == (0, "True\n" * 3), done.stderr


def test_every_error_is_a_public_name() -> None:
    assert all(hasattr(ggml_kvq, name) for name in ggml_kvq.__all__)
    assert {"Sampling", "StateError", "ContextOverflowError"} <= set(ggml_kvq.__all__)
    inside = {"LaunchError"}  # of the launchers, which print it
    for path in sorted((ROOT / "python" / "ggml_kvq").rglob("*.py")):
        for name in re.findall(r"^class (\w+Error)\(", path.read_text(), re.MULTILINE):
            assert name in {*ggml_kvq.__all__, *inside}, f"{name} of {path.name} cannot be caught by its name"


def test_the_table_of_calls_lists_every_argument_of_model() -> None:
    rows = re.findall(r"^\| `Model\(.*", (ROOT / "docs" / "llama-cpp.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"\w+", row.split("|")[1])}
    assert set(inspect.signature(Model.__init__).parameters) - {"self"} <= named


def test_the_table_of_calls_lists_every_call_of_model() -> None:
    """generate_many, feed and truncate were not there."""
    page = (ROOT / "docs" / "llama-cpp.md").read_text()
    rows = page[page.index("| call | |") :].split("\n\n")[0].splitlines()[2:]
    named = {name for row in rows for name in re.findall(r"`(\w+)[(`]", row.split("|")[1])}
    assert {name for name in dir(Model) if not name.startswith("_")} <= named


def test_ctrl_c_while_c_code_calls_back(capfd: pytest.CaptureFixture[str]) -> None:
    """llama.cpp's log calls Python, where a KeyboardInterrupt was printed and forgotten: the model went on loading."""
    import ctypes

    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(lambda a, b: 0)
    numbers = (ctypes.c_int * 4096)()
    threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    passed = 0
    with pytest.raises(KeyboardInterrupt), processes.interrupt_held():
        for _ in range(40):
            ctypes.CDLL(None).qsort(numbers, 4096, 4, callback)
            passed += 1
    assert passed == 40 and "Exception ignored" not in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_a_model_loads(demo_model: Path) -> None:
    code = (
        "import os, signal, sys\nfrom ggml_kvq import Model\nfrom ggml_kvq.core import loader\n"
        "write, seen = loader._Log.write, []\n"
        "def slow(self, *args):\n"
        "    if not seen:\n        seen.append(1); os.kill(os.getpid(), signal.SIGINT)\n"
        "    return write(self, *args)\n"
        "loader._Log.write = slow\n"
        "try:\n    Model(sys.argv[1], 'kivi', n_ctx=256, n_threads=1)\n    print('loaded')\n"
        "except KeyboardInterrupt:\n    print('stopped', len(seen))\n"
    )
    done = run_python(code, str(demo_model))
    assert (done.stdout, done.stderr) == ("stopped 1\n", "")


# ------------------------------------------------------------------ options, variables


def test_options_given_twice(demo_model: Path) -> None:
    base = ["-m", str(demo_model), "--kv-method", "kivi"]
    with pytest.raises(KvqError, match="--kv-opt: bits=2 and bits=4 name one option twice"):
        launcher.command("llama-cli", [*base, "--kv-opt", "bits=2", "--kv-opt", "bits=4"], {})
    with pytest.raises(KvqError, match="KVQ_OPTS: bits=2 and bits=4 name one option twice"):
        launcher.command("llama-cli", base, {"KVQ_OPTS": "bits=2, bits=4"})
    # a flag is stronger than a variable, and the load line shows what counts
    cmd = launcher.command("llama-cli", [*base, "--kv-opt", "bits=4"], {"KVQ_OPTS": "bits=3,window=64"})
    assert cmd.env["KVQ_OPTS"] == "bits=4,window=64"
    assert native.merge_options("x", "bits=2, bits=2 ,", "") == "bits=2"


def test_the_flag_that_was_meant(demo_model: Path) -> None:
    """llama.cpp named the misspelt flag and no cure. What is its own, or may be one day, is left to it."""
    for head, cure in {
        "--kv-opts": "--kv-opt KEY=VALUE",
        "--kv-methd": "--kv-method NAME",
        "--kv_metod": "--kv-method NAME",
        "--kv-buget": "--kv-budget SIZE",
        "--kv-conf": "--kv-config FILE.gguf",
        "--kv-opt-drft": "--kv-opt-draft KEY=VALUE",
        "--kv-stats-fil": "--kv-stats-file FILE.json",
    }.items():
        for argv in ([head, "bits=2"], [f"{head}=bits=2"]):
            with pytest.raises(KvqError, match=f"^{head} is unknown: write {cure}$"):
                launcher.command("llama-cli", ["-m", str(demo_model), *argv], {})
    own = ["--kv-unified", "--kv-offload", "--kv-unified-per-slot", "--kv-unifed", "--kv-ofload", "--no-kv-offload"]
    ahead = ["--kv-host", "--kv-split", "--kv-output", "--kv-type", "--kv-cache", "--kv-model", "--override-kv"]
    for flag in (*own, *ahead):
        assert flag in launcher.command("llama-cli", ["-m", str(demo_model), flag], {}).args
    assert launcher.command("llama-cli", ["-m", str(demo_model), "-p", "--kv-opts"], {}).args[-1] == "--kv-opts"


def test_a_method_may_be_none(demo_model: Path) -> None:
    for argv, env in ((["--kv-method", "kiwi"], {}), ([], {"KVQ_METHOD": "kiwi"})):
        with pytest.raises(KvqError, match="unknown method 'kiwi': choose one of f16, .*, auto, lab or none$"):
            launcher.command("llama-cli", ["-m", str(demo_model), *argv], env)


def test_variables_that_are_not_used_are_named(demo_model: Path) -> None:
    base = ["-m", str(demo_model)]
    cmd = launcher.command("llama-cli", base, {"KVQ_OPTS": "bits=2"})
    assert any("KVQ_OPTS=bits=2 is not used" in note for note in cmd.notes)
    cmd = launcher.command("llama-cli", [*base, "--kv-method", "none"], {"KVQ_OPTS": "bits=2"})
    assert not cmd.notes  # llama.cpp's own cache was asked for
    env = {"KVQ_METHOD": "xquant", "KVQ_OPTS": "preset=1.16"}
    cmd = launcher.command("llama-cli", [*base, "--kv-method", "kivi"], env)
    assert any("KVQ_OPTS=preset=1.16 goes with KVQ_METHOD=xquant" in note for note in cmd.notes)
    assert cmd.env["KVQ_OPTS"] is None


def test_doctor_sees_a_misspelt_variable() -> None:
    done = run_python(CLI, "doctor", env={"KVQ_METHDO": "kivi", "KVQ_OPTS": "bits=2"})
    assert re.search(r"note\s+KVQ_METHDO: nothing reads this variable\s+-> write KVQ_METHOD", done.stdout), done.stdout
    assert "bits=2 without KVQ_METHOD" in done.stdout


def test_info_of_more_tokens_than_llama_cpp_counts(demo_model: Path) -> None:
    done = run_python(CLI, "info", str(demo_model), "-c", "99999999999999")
    assert done.returncode == 2 and "outside 1..2147483392" in done.stderr


# ------------------------------------------------------------------ files of the wrong kind


def test_embed_of_what_is_no_sidecar(demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "text.gguf").write_text("hello")
    assert cli.main(["embed", str(demo_model), str(tmp_path / "text.gguf"), str(tmp_path / "out.gguf")]) == 2
    message = (
        "text.gguf is not a GGUF file (it does not begin with 'GGUF'); give a sidecar that ggml-kvq calibrate wrote"
    )
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.gguf").exists()
    argv = ["-m", str(demo_model), "--kv-method", "aqua", "--kv-config", str(tmp_path / "text.gguf")]
    with pytest.raises(KvqError, match=re.escape(message)):
        launcher.command("llama-cli", argv, {})


def test_a_plot_of_the_base_alone(tmp_path: Path) -> None:
    row = {"key": {"kind": "text", "cache": "f16"}, "method": "upstream", "bits": 16, "bits_no_window": 16}
    with pytest.raises(KvqError, match="the f16 base alone"):
        plotting.frontier([{**row, "kld_mean": 0.0}], tmp_path / "x.png")


# ------------------------------------------------------------------ drafts from the hub


def test_a_draft_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, write_gguf: Callable[..., Path], tmp_path: Path, demo_model: Path
) -> None:
    """-hfd went to llama.cpp, whose download is not compiled in."""
    monkeypatch.setattr(hub, "_files", lambda repo, token: ["d-Q4_K_M.gguf", "d-Q8_0.gguf"])
    monkeypatch.setattr(hub, "fetch", lambda spec, **_: write_gguf(spec.rsplit("/", 1)[1], LLAMA_FIELDS))
    small, large = str(tmp_path / "d-Q4_K_M.gguf"), str(tmp_path / "d-Q8_0.gguf")
    for argv, env, expected in (
        (["-hfd", "o/d"], {}, small),
        (["--spec-draft-hf", "o/d:Q8_0"], {}, large),
        (["-md", "hf:o/d/d-Q8_0.gguf"], {}, large),
        ([], {"LLAMA_ARG_SPEC_DRAFT_HF_REPO": "o/d:Q8_0"}, large),
    ):
        args, gone = hub_args.resolve("llama-server", ["-m", "x.gguf", *argv], env)
        assert args == ["-m", "x.gguf", "-md", expected]
        assert gone == dict.fromkeys(env)
    args, _ = hub_args.resolve("llama-server", ["-hf", "o/r:Q8_0", "-hfd", "o/d", "-hft", "token"], {})
    assert args == ["-md", small, "-m", large]
    for argv, word in ((["-hfd", "o"], "write -hfd owner/repo"), (["-hfd", "o/d", "-md", "x"], "drop one of them")):
        with pytest.raises(KvqError, match=re.escape(word)):
            hub_args.resolve("llama-server", argv, {})
    cmd = launcher.command("llama-server", ["-m", str(demo_model), "--kv-method", "kivi", "-hfd", "o/d"], {})
    assert cmd.args[cmd.args.index("-md") + 1] == small and "-devd" in cmd.args


def test_layers_that_a_method_does_not_get_are_named(demo_model: Path) -> None:
    """n_gpu_layers=0 was told as a model without attention; 3 left ten layers of twelve in f16 without a word."""
    with pytest.raises(ggml_kvq.MethodError, match="n_gpu_layers=0 leaves the KV cache of every layer"):
        Model(demo_model, "kivi", n_ctx=256, n_threads=1, n_gpu_layers=0)
    with pytest.warns(UserWarning, match="n_gpu_layers=3: 10 of 12 layers keep llama.cpp's own f16 cache"):
        m = Model(demo_model, "f16", n_ctx=256, n_threads=1, n_gpu_layers=3)
    with m:
        assert m.kv_stats()["n_layer"] == 2
    assert arguments.weights_on_cpu(demo_model, "kivi", 3, 1)
    assert not any(arguments.weights_on_cpu(demo_model, m, 3, 1) for m in (None, "upstream", "f16"))
    assert not arguments.weights_on_cpu(demo_model, "kivi", 3, 2)
    with Model(demo_model, "kivi", n_ctx=256, n_threads=1, n_gpu_layers=3) as m:
        assert m.kv_stats()["n_layer"] == 12  # weights of ten layers stay on the CPU, their caches do not
        text = "".join(m.generate("The file", max_tokens=8, temperature=0))
    with Model(demo_model, "kivi", n_ctx=256, n_threads=1) as m:
        assert "".join(m.generate("The file", max_tokens=8, temperature=0)) == text


@pytest.mark.parametrize("command", ["ggml_kvq.cli", "ggml_kvq"])
def test_a_library_that_was_cut_off_is_named(command: str, tmp_path: Path) -> None:
    """A copy that met a full disk: the dynamic linker maps it, and the process ended by SIGBUS without a line."""
    cut = tmp_path / _paths.BACKEND_FILE
    cut.write_bytes(_paths.backend().read_bytes()[:1_000_000])
    argv = [sys.executable, "-m", command, *(["doctor"] if command.endswith("cli") else [])]
    done = subprocess.run(argv, env={**os.environ, "KVQ_BACKEND": str(cut)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"{cut} is cut off after 1000000 bytes" in done.stdout


def test_flags_are_true_or_false(demo_model: Path) -> None:
    """swa_full="no" and reset="no" counted as True."""
    with pytest.raises(TypeError, match="swa_full='no' is a str; pass True or False"):
        Model(demo_model, n_ctx=256, n_threads=1, swa_full="no")  # type: ignore[arg-type]
    with Model(demo_model, n_ctx=256, n_threads=1) as m, pytest.raises(TypeError, match="reset='no'"):
        m.generate("a", reset="no")  # type: ignore[arg-type]
