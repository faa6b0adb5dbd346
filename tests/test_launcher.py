"""Launchers: what they take away, add and refuse, and that nothing of Python is left behind them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import LLAMA_FIELDS, gguf_bytes, run_python
from ggml_kvq import _paths
from ggml_kvq.errors import KvqError
from ggml_kvq.launch import launcher, refusals

CALL = "import sys; from ggml_kvq.launch.launcher import run; sys.exit(run('llama-cli', sys.argv[1:]))"
PROGRAMS = ["llama-cli", "llama-completion", "llama-server", "llama-bench", "llama-perplexity"]
SERVER = "llama-server"
ADDED = ["-dev", "KVQ0", "-fa", "on"]
FIT = [
    "-fit",
    "off",
]  # the launcher has held the compressed size against the memory; on a CPU upstream would only move layers


def page(program: str) -> list[str]:
    folder = _paths.page_dir()
    return ["--path", str(folder)] if program == SERVER and folder else []


def refusal(program: str, *argv: str, env: dict[str, str] | None = None) -> str:
    with pytest.raises(KvqError) as e:
        launcher.command(program, argv, env or {})
    text = str(e.value)
    assert "\n" not in text
    return text


# ------------------------------------------------------------------ without a method


@pytest.mark.parametrize("program", PROGRAMS)
def test_without_method_nothing_changes(program: str, demo_model: Path) -> None:
    argv = ["-m", str(demo_model), "-fa", "off", "-dev", "none", "-p", "--kv-method"]
    got = launcher.command(program, argv, {"LLAMA_ARG_THREADS": "3"})
    assert (got.args, got.env, got.notes) == ([*page(program), *argv], {}, [])


def test_option_without_method_is_refused() -> None:
    assert "--kv-method" in refusal("llama-cli", "--kv-opt", "group=64")


# ------------------------------------------------------------------ with a method


@pytest.mark.parametrize("program", PROGRAMS)
def test_method_sets_environment_device_and_flash_attention(program: str, demo_model: Path) -> None:
    argv = ["-m", str(demo_model), "--kv-method", "kivi", "-n", "8", "--kv-opt", "group=64", "--kv-opt=window=64"]
    got = launcher.command(program, argv, {})
    fit, kind = [] if program == "llama-bench" else FIT, ["-ctk", "q4_0", "-ctv", "q4_0"] if program == SERVER else []
    assert got.args == [*ADDED, *kind, *fit, "-m", str(demo_model), "-n", "8"]
    assert got.env == {
        "KVQ_LAUNCHER": program,
        "GGML_BACKEND_PATH": str(_paths.backend()),
        "KVQ_METHOD": "kivi",
        "KVQ_OPTS": "group=64,window=64",
        "KVQ_CONFIG": None,
        "KVQ_MODEL": str(demo_model),
    }


@pytest.mark.parametrize("spelling", [["--kv-method", "f16"], ["--kv-method=f16"], ["--kv_method", "f16"]])
def test_spellings(spelling: list[str]) -> None:
    got = launcher.command("llama-cli", spelling, {})
    assert got.env["KVQ_METHOD"] == "f16" and got.args == [*ADDED, *FIT]


@pytest.mark.parametrize(
    "chosen", [["-dev", "KVQ0"], ["--device", "KVQ0"], ["-fa", "on"], ["--flash-attn", "auto"], ["--flash_attn", "1"]]
)
def test_users_choice_stands(chosen: list[str]) -> None:
    args = launcher.command("llama-cli", ["--kv-method", "f16", *chosen], {}).args
    assert args[-2:] == chosen and len(args) == 6 and args[2:4] == FIT
    assert ("-dev" in args[:2]) != ("dev" in chosen[0])


def test_users_choice_by_environment_stands_except_in_llama_bench() -> None:
    env = {"LLAMA_ARG_DEVICE": "KVQ0", "LLAMA_ARG_FLASH_ATTN": "on"}
    assert launcher.command("llama-cli", ["--kv-method", "f16"], env).args == FIT
    assert launcher.command("llama-bench", ["--kv-method", "f16"], env).args == ADDED


def test_environment_twins_and_precedence() -> None:
    env = {"KVQ_METHOD": "kivi", "KVQ_OPTS": "group=64"}
    assert launcher.command("llama-cli", [], env).env["KVQ_METHOD"] == "kivi"
    assert launcher.command("llama-cli", ["--kv-opt", "window=64"], env).env["KVQ_OPTS"] == "group=64,window=64"
    other = launcher.command("llama-cli", ["--kv-method", "f16"], env).env
    assert (other["KVQ_METHOD"], other["KVQ_OPTS"]) == ("f16", None)  # options of another method do not leak


def test_method_of_the_models_metadata(write_gguf: Callable[..., Path]) -> None:
    model = write_gguf("m.gguf", {**LLAMA_FIELDS, "kvq.method": "kivi"})
    assert launcher.command("llama-cli", ["-m", str(model)], {}).env["KVQ_METHOD"] == "kivi"
    assert launcher.command("llama-cli", [], {"LLAMA_ARG_MODEL": str(model)}).env["KVQ_METHOD"] == "kivi"
    assert launcher.command("llama-cli", ["-m", str(model), "--kv-method", "f16"], {}).env["KVQ_METHOD"] == "f16"
    foreign = write_gguf("f.gguf", {**LLAMA_FIELDS, "kvq.method": "nosuch"})
    text = refusal("llama-cli", "-m", str(foreign))
    assert "nosuch" in text and str(foreign) in text


def test_config_file_names_the_method_and_must_fit(write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    config = write_gguf("c.gguf", {"general.type": "kvq", "kvq.version": 1, "kvq.method": "kivi"})
    got = launcher.command("llama-cli", ["--kv-config", str(config)], {}).env
    assert (got["KVQ_METHOD"], got["KVQ_CONFIG"]) == ("kivi", str(config))
    assert "kivi" in refusal("llama-cli", "--kv-config", str(config), "--kv-method", "xquant")
    assert "nowhere.gguf" in refusal("llama-cli", "--kv-config", "nowhere.gguf")
    assert "kvq." in refusal("llama-cli", "--kv-config", str(write_gguf("plain.gguf", LLAMA_FIELDS)))


def test_llama_bench_with_several_models(write_gguf: Callable[..., Path]) -> None:
    a, b = (str(write_gguf(f"{n}.gguf", LLAMA_FIELDS)) for n in "ab")
    assert "KVQ_MODEL" not in launcher.command("llama-bench", ["-m", f"{a},{b}", "--kv-method", "f16"], {}).env
    assert launcher.command("llama-bench", ["-m", a, "--kv-method", "f16"], {}).env["KVQ_MODEL"] == a


def test_projector_stays_off_the_cache_device() -> None:
    assert "--no-mmproj-offload" in launcher.command(SERVER, ["--kv-method", "f16", "--mmproj", "p.gguf"], {}).args
    assert "--no-mmproj-offload" not in launcher.command(SERVER, ["--kv-method", "f16"], {}).args


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--kv-method", "nosuch"], ["nosuch", "kivi"]),
        (["--kv-method", ""], ["''"]),
        (["--kv-method"], ["--kv-method NAME"]),
        (["--kv-opt"], ["KEY=VALUE"]),
        (["--kv-method", "kivi", "--kv-opt", "group"], ["'group'", "KEY=VALUE"]),
        (["--kv-method", "kivi", "--kv-opt", "=64"], ["'=64'", "KEY=VALUE"]),
        (["--kv-method", "kivi", "--kv-opt", "gruop=64"], ["gruop", "group"]),
        (["--kv-method", "kivi", "--kv-opt", "group=many"], ["group=many", "int"]),
        (["--kv-method", "kivi", "--kv-opt", "bits=9"], ["9", "1..4"]),
        (["--kv-method", "f16", "-fa", "off"], ["-fa off", "-fa on"]),
        (["--kv-method", "f16", "-dev", "none"], ["-dev none", "KVQ0"]),
        (["--kv-method", "f16", "-ngl", "0"], ["-ngl 0", "drop -ngl"]),
        (["--kv-method", "f16", "--no-kv-offload"], ["-nkvo", "f16"]),
        (["--kv-method", "f16", "-kvo", "-nkvo"], ["-nkvo", "f16"]),
        (["--kv-method", "f16", "-ctk", "bf16"], ["-ctk bf16", "drop one"]),
        (["--kv-method", "f16", "-ctv", "f32"], ["-ctv f32", "iq4_nl", "drop one"]),
    ],
)
def test_refusals_name_value_and_cure(argv: list[str], words: list[str]) -> None:
    text = refusal("llama-cli", *argv)
    assert all(word in text for word in words), text


def test_of_twin_switches_the_last_counts() -> None:
    f16 = ["--kv-method", "f16"]
    assert launcher.command("llama-cli", [*f16, "-nkvo", "-kvo"], {}).env["KVQ_METHOD"] == "f16"
    environ = {"LLAMA_ARG_KV_OFFLOAD": "off"}
    assert launcher.command("llama-cli", [*f16, "-kvo"], environ).env["KVQ_METHOD"] == "f16"
    with pytest.raises(KvqError, match="-nkvo"):
        launcher.command("llama-cli", f16, environ)


def test_a_place_that_follows_room_comes_without_fitting(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's --fit would move layers to the CPU first."""
    monkeypatch.setattr(refusals, "on_gpu", lambda: True)
    auto = ["--kv-method", "kivi", "--kv-opt", "place=auto"]
    args = launcher.command("llama-cli", auto, {}).args
    assert args[args.index("-fit") + 1] == "off"
    assert launcher.command("llama-cli", [*auto, "-fit", "on"], {}).args.count("-fit") == 1
    assert "-fit" not in launcher.command("llama-cli", auto[:2], {}).args


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        (["-nkvo"], {}),
        (["--no-kv-offload"], {}),
        ([], {"LLAMA_ARG_KV_OFFLOAD": "0"}),
        ([], {"LLAMA_ARG_NO_KV_OFFLOAD": "1"}),
    ],
)
def test_a_cache_of_the_host_stays_ours(argv: list[str], environ: dict[str, str]) -> None:
    """-nkvo is llama.cpp's own cache in its memory of the host: ours has an option for that."""
    found = launcher.command("llama-cli", ["--kv-method", "kivi", *argv], environ)
    assert found.env["KVQ_OPTS"] == "place=host" and not set(argv) & set(found.args)
    assert found.env["LLAMA_ARG_KV_OFFLOAD"] is None
    with pytest.raises(KvqError, match="-nkvo keeps"):
        launcher.command("llama-cli", ["--kv-method", "kivi", "--kv-opt", "place=device", *argv], environ)
    with pytest.raises(KvqError, match="-nkvo keeps.*place=host"):
        launcher.command("llama-bench", ["--kv-method", "kivi", "-nkvo", "1"], {})
    with pytest.raises(KvqError, match="place=host cannot go with window=auto"):
        launcher.command("llama-cli", ["--kv-method", "kivi", "--kv-opt", "window=auto", *argv], environ)


@pytest.mark.parametrize("arch", ["bert", "nomic-bert-moe", "llada"])
def test_a_model_without_cache_is_refused(arch: str, write_gguf: Callable[..., Path]) -> None:
    path = write_gguf("encoder.gguf", {"general.architecture": arch})
    text = refusal("llama-server", "-m", str(path), "--kv-bits", "2.5")
    assert f"encoder.gguf ({arch}) keeps no KV cache" in text and "drop --kv-bits 2.5" in text
    with pytest.raises(KvqError, match="KVQ_METHOD=kivi would not be used: add --kv-method none"):
        launcher.command("llama-server", ["-m", str(path)], {"KVQ_METHOD": "kivi"})
    off = launcher.command("llama-server", ["-m", str(path), "--kv-method", "none"], {"KVQ_METHOD": "kivi"})
    assert off.env["KVQ_METHOD"] is None


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["-fa", "1,0"], "-fa 1,0"),
        (["-nkvo", "1"], "-nkvo"),
        (["-ngl", "0,99"], "-ngl 0,99"),
        (["-ctv", "f16,bf16"], "bf16"),
    ],
)
def test_llama_bench_lists_are_read(argv: list[str], word: str) -> None:
    assert word in refusal("llama-bench", "--kv-method", "f16", *argv)


def test_the_rpc_server_takes_our_flags(demo_model: Path, tmp_path: Path) -> None:
    argv = ["-p", "50052", "--kv-method", "kivi", "--kv-model", str(demo_model)]
    got = launcher.command("ggml-rpc-server", argv, {"LLAMA_ARG_DEVICE": "CPU"})
    assert got.args == ["-d", "KVQ0", "-p", "50052"] and got.remote
    assert (got.env["KVQ_METHOD"], got.env["KVQ_MODEL"]) == ("kivi", str(demo_model))
    assert launcher.command("ggml-rpc-server", ["--kv-method=kivi", "-d", "KVQ0,KVQ1"], {}).args == ["-d", "KVQ0,KVQ1"]
    got = launcher.command("ggml-rpc-server", ["-p", "50052"], {})
    assert (got.args, got.env, got.notes, got.remote) == (["-p", "50052"], {}, [], True)


def test_servers_are_named_before_their_devices(monkeypatch: pytest.MonkeyPatch, demo_model: Path) -> None:
    monkeypatch.setattr("socket.create_connection", lambda *_, **__: open(os.devnull))
    monkeypatch.setattr(launcher, "_rpc_devices", lambda *_: ["RPC0", "RPC1", "RPC2"])
    argv = ["-m", str(demo_model), "-p", "--rpc", "--rpc", "a:1,b:2", "--kv-method", "kivi", "-n", "8"]
    got = launcher.command("llama-cli", argv, {})
    added = ["--rpc", "a:1,b:2", "-dev", "RPC0,RPC1,RPC2,KVQ0", "-fa", "on"]
    assert got.args == [*added, "-m", str(demo_model), "-p", "--rpc", "-n", "8"]
    assert got.remote and "a:1,b:2" in got.notes[0] and "llama-rpc-server --kv-method kivi" in got.notes[0]
    assert "RPC0/RPC1/RPC2/KVQ0" in launcher.command("llama-bench", ["-rpc", "a:1", "--kv-method", "kivi"], {}).args
    by_environment = launcher.command("llama-cli", ["--kv-method", "kivi", "-n", "8"], {"LLAMA_ARG_RPC": "a:1"})
    assert by_environment.args[:2] == ["-dev", "RPC0,RPC1,RPC2,KVQ0"]
    chosen = ["--rpc", "a:1", "-dev", "RPC0,KVQ0", "-fa", "on"]
    assert launcher.command("llama-cli", [*chosen, "--kv-method", "kivi"], {}).args == chosen  # as the user put it
    assert "drop --kv-method kivi" in refusal("llama-cli", "--rpc", "a:1", "-dev", "RPC0,RPC1", "--kv-method", "kivi")


def test_partial_offload_is_said(demo_model: Path) -> None:
    got = launcher.command("llama-cli", ["-m", str(demo_model), "--kv-method", "f16", "-ngl", "5"], {})
    assert "8 of 12 layers" in got.notes[0]
    assert not launcher.command("llama-cli", ["-m", str(demo_model), "--kv-method", "f16", "-ngl", "13"], {}).notes


def test_layers_of_the_cpu_keep_our_cache(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["-m", str(demo_model), "--kv-method", "kivi"]
    for more, env in (["-ngl", "5"], {}), ([], {"LLAMA_ARG_N_GPU_LAYERS": "5"}):
        got = launcher.command("llama-cli", [*argv, *more], env)
        assert "weights of 8 of 12 layers stay on the CPU, caches of all layers on KVQ0" in got.notes[0]
        assert "-ngl" not in got.args and got.env["LLAMA_ARG_N_GPU_LAYERS"] is None
    assert "-ctk" in launcher.command("llama-server", [*argv, "-ngl", "5"], {}).args  # no layer is llama.cpp's
    monkeypatch.setattr(refusals, "on_gpu", lambda: True)
    for program in "llama-cli", "llama-bench":
        got = launcher.command(program, [*argv, "-ngl", "5"], {})
        regex = got.args[got.args.index("-ot") + 1]
        assert got.args[got.args.index("-ngl") + 1] == "99999" and "place=auto" in (got.env["KVQ_OPTS"] or "")
        pattern = re.compile(regex.removesuffix("=CPU"))
        assert pattern.search("blk.0.attn_q.weight") and pattern.search("blk.7.ffn_gate_exps.weight")
        assert not any(map(pattern.search, ("blk.7.attn_norm.weight", "blk.8.attn_q.weight", "blk.71.ffn_up.weight")))
    got = launcher.command("llama-server", [*argv, "-ngl", "5", "-ot", "a=CPU", "-ot", "b=CPU"], {})
    rules = got.args[got.args.index("-ot") + 1].split(",")
    assert rules[:2] == ["a=CPU", "b=CPU"] and len(rules) == 3 and got.args.count("-ot") == 1
    assert "-fit" not in got.args  # it shortens a context that nobody named
    for program, more in (
        ("llama-cli", ["-dev", "KVQ0,KVQ1"]),
        ("llama-cli", ["-dev", "KVQ0,KVQ1", "-sm", "tensor"]),
        ("llama-bench", ["-ot", "a=CPU"]),
        ("llama-bench", ["-m", str(demo_model)]),
    ):
        got = launcher.command(program, [*argv, "-ngl", "5", *more], {})
        assert any("keep llama.cpp's own f16 cache" in note for note in got.notes) and "99999" not in got.args
    held = launcher.command("llama-cli", [*argv, "-ngl", "5", "--kv-opt", "place=device"], {})
    assert held.env["KVQ_OPTS"] == "place=device"
    lists = launcher.command("llama-bench", [*argv, "-ngl", "5,99"], {})
    assert "8 of 12 layers keep llama.cpp's own f16 cache" in lists.notes[0] and "-ot" not in lists.args


def test_foreign_backend_path_is_said() -> None:
    env = {"GGML_BACKEND_PATH": "/elsewhere/libggml-other.so"}
    assert "/elsewhere/libggml-other.so" in launcher.command("llama-cli", ["--kv-method", "f16"], env).notes[0]
    assert launcher.command("llama-cli", [], env).env == {}


@pytest.mark.parametrize("length", [0, 3, 10, 23, 24, 40, 100])
def test_cut_off_gguf(tmp_path: Path, length: int) -> None:
    whole = gguf_bytes(LLAMA_FIELDS)
    assert length < len(whole)
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:length])
    assert str(path) in refusal("llama-cli", "-m", str(path))


def test_foreign_file_and_version(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    assert "not a GGUF" in refusal("llama-cli", "-m", str(path))
    assert "version 9" in refusal("llama-cli", "-m", str(write_gguf("v9.gguf", LLAMA_FIELDS, version=9)))


@pytest.mark.parametrize("method", [[], ["--kv-method", "f16"]])
def test_missing_model_is_one_line(method: list[str], tmp_path: Path) -> None:
    assert "-m /nowhere.gguf does not exist" in refusal("llama-cli", "-m", "/nowhere.gguf", *method)
    assert "is a folder" in refusal("llama-bench", "-m", str(tmp_path), *method)
    fetched = ["-m", "/nowhere.gguf", "-mu", "http://localhost/x.gguf", *method]  # the place to download to
    assert launcher.command("llama-cli", fetched, {}).args[-4:] == fetched[:4]


# ------------------------------------------------------------------ the exec


@pytest.fixture
def recorder(tmp_path: Path) -> dict[str, str]:
    """Environment whose llama-cli is a script that reports what it was started with; the libraries are the real
    ones.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    for path in _paths.lib_dir().glob("lib*.so*"):
        (folder / path.name).symlink_to(path.resolve())
    script = folder / "llama-cli"
    script.write_text(
        f"#!{sys.executable}\n"
        "import json, os, signal, sys\n"
        "if '--die' in sys.argv: os.kill(os.getpid(), signal.SIGTERM)\n"
        "if '--exit' in sys.argv: sys.exit(37)\n"
        "status = dict(l.split(':', 1) for l in open('/proc/self/status') if ':' in l)\n"
        "print(json.dumps({'argv': sys.argv[1:], 'pid': os.getpid(), 'stdin': sys.stdin.read(),\n"
        "                  'env': {k: v for k, v in os.environ.items() if k.startswith(('KVQ', 'GGML'))}}))\n"
        "print('diagnostics', file=sys.stderr)\n"
    )
    script.chmod(0o755)
    return {"KVQ_LIB_DIR": str(folder), "KVQ_BACKEND": str(_paths.backend())}


def test_exec_replaces_python_and_passes_everything(recorder: dict[str, str], demo_model: Path) -> None:
    argv = ["-m", str(demo_model), "--kv-method", "xquant", "-p", "two words", ""]
    with subprocess.Popen(
        [sys.executable, "-c", CALL, *argv],
        env={**os.environ, **recorder},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        out, err = process.communicate("typed\n", timeout=60)
        got = json.loads(out)
        assert got["pid"] == process.pid  # the same process: exec, not a child
    assert got["argv"] == [*ADDED, *FIT, "-m", str(demo_model), "-p", "two words", ""]
    assert got["stdin"] == "typed\n" and err == "diagnostics\n" and process.returncode == 0
    assert got["env"]["KVQ_METHOD"] == "xquant" and got["env"]["GGML_BACKEND_PATH"] == recorder["KVQ_BACKEND"]


def test_exit_code_and_signal_are_the_programs(recorder: dict[str, str]) -> None:
    assert run_python(CALL, "--exit", env=recorder).returncode == 37
    assert run_python(CALL, "--die", env=recorder).returncode == -signal.SIGTERM


def test_program_finds_sigpipe_as_a_shell_leaves_it(recorder: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "bin" / "llama-cli").write_text("#!/bin/sh\ngrep SigIgn /proc/self/status\n")
    ignored = int(run_python(CALL, env=recorder).stdout.split()[1], 16)
    assert not ignored & (1 << (signal.SIGPIPE - 1)) and not ignored & (1 << (signal.SIGXFSZ - 1))


def test_refusal_is_one_line_and_exit_code_2(recorder: dict[str, str]) -> None:
    got = run_python(CALL, "--kv-method", "nosuch", env=recorder)
    assert got.returncode == 2 and got.stdout == ""
    assert got.stderr.startswith("llama-cli: error: ") and got.stderr.count("\n") == 1


def test_missing_program_and_library(tmp_path: Path) -> None:
    got = run_python(CALL, env={"KVQ_LIB_DIR": str(tmp_path)})
    assert got.returncode == 2 and str(tmp_path / "llama-cli") in got.stderr and got.stderr.count("\n") == 1
    got = run_python(CALL, "--kv-method", "f16", env={"KVQ_BACKEND": str(tmp_path / "no.so")})
    assert got.returncode == 2 and "no.so" in got.stderr and got.stderr.count("\n") == 1


def test_launcher_imports_nothing_heavy() -> None:
    modules = "ggml_kvq.launch.launcher, ggml_kvq.methods, ggml_kvq.gguf_header"
    code = f"import sys; import {modules}; print(sorted(sys.modules))"
    loaded = run_python(code).stdout
    assert "ggml_kvq.launch.launcher" in loaded
    for heavy in ("numpy", "argparse", "ggml_kvq.core.model", "ggml_kvq.core.loader"):
        assert f"'{heavy}'" not in loaded


@pytest.mark.parametrize("program", PROGRAMS)
def test_installed_programs_start(program: str) -> None:
    """The real program behind each launcher: it loads its libraries and answers --help after our own options."""
    got = run_python(f"import sys; from ggml_kvq.launch.launcher import run; sys.exit(run('{program}', ['--help']))")
    assert got.returncode == 0, got.stderr
    assert "--kv-method NAME" in got.stdout and "--flash-attn" in got.stdout


def test_installed_rpc_server_starts() -> None:
    got = run_python(
        "import sys; from ggml_kvq.launch.launcher import run; sys.exit(run('ggml-rpc-server', ['--help']))"
    )
    assert got.returncode == 0, got.stderr
    assert "--kv-method NAME" in got.stdout and "--kv-model FILE.gguf" in got.stdout and "--port PORT" in got.stderr
