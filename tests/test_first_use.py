"""The first use of a model: what is measured once is found again by what the file holds, and by every program: a
renamed copy, a router's children, several models of a bench, a model of several files, the library alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from ggml_kvq import Model, _paths, cpus, default_means, progress
from ggml_kvq import files as disk
from ggml_kvq.calibrate import capture, halves
from ggml_kvq.errors import KvqError
from ggml_kvq.launch import launcher, router
from ggml_kvq.launch.flags import User
from ggml_kvq.resolver import FirstUse
from test_server_page import server

MEASURED = "data measured on the model's first use"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder where the demo model was measured."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("KVQ_CACHE_DIR")
    os.environ["KVQ_CACHE_DIR"] = str(folder)
    there, why = default_means.ensure(Path(__file__).parents[1] / "models/kvq-demo-q8_0.gguf", print, 1)
    assert there, why
    yield folder
    os.environ.pop("KVQ_CACHE_DIR")
    if before is not None:
        os.environ["KVQ_CACHE_DIR"] = before


def alone(program: str, *argv: str, **env: str) -> str:
    """stderr of one of llama.cpp's programs with the library, started without our launcher."""
    ours = {"GGML_BACKEND_PATH": str(_paths.backend()), "KVQ_METHOD": "auto", "KVQ_OPTS": "bits=3.5", **env}
    call = [str(_paths.program(program)), *argv, "-dev", "KVQ0", "-fa", "on", "-t", "1"]
    done = subprocess.run(call, env={**os.environ, **ours}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr


def load_lines(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("ggml-kvq: auto [")]


# ------------------------------------------------------------------ found again


def test_a_copy_of_another_name_is_not_measured_again(cache: Path, demo_model: Path, tmp_path: Path) -> None:
    """The name was part of the file's name: a renamed model took its 20 seconds once more."""
    copy = tmp_path / "another name.gguf"
    shutil.copy(demo_model, copy)
    said: list[str] = []
    there, why = default_means.ensure(copy, said.append)
    assert there == str(default_means.path_of(demo_model)) and not why and not said
    other = bytearray(copy.read_bytes())
    other[-1] ^= 1  # of the last weights
    copy.write_bytes(other)
    assert default_means.path_of(copy) != Path(there)


def test_the_library_alone_finds_them(cache: Path, demo_model: Path) -> None:
    argv = ["-p", "a", "-n", "1", "-c", "256", "-no-cnv"]
    (line,) = load_lines(alone("llama-completion", "-m", str(demo_model), *argv))
    assert MEASURED in line and "channel means are taken off" in line
    (line,) = load_lines(alone("llama-completion", "-m", str(demo_model), *argv, KVQ_CONFIG="none"))
    assert "means" not in line
    (line,) = load_lines(alone("llama-completion", "-m", str(demo_model), *argv, KVQ_CACHE_DIR="/no/such"))
    assert "nothing is known of this model's keys" in line and "ggml-kvq plugin -m MODEL measures them once" in line


def test_plugin_measures_for_programs_without_a_launcher(demo_model: Path, tmp_path: Path) -> None:
    """The cure that the load line names."""
    argv = [sys.executable, "-m", "ggml_kvq.cli", "plugin", "-m", str(demo_model), "-t", "2"]
    env = {**os.environ, "KVQ_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0 and f"# measured: {tmp_path}" in done.stdout, done.stderr
    assert "export GGML_BACKEND_PATH=" in done.stdout
    call = ["-m", str(demo_model), "-p", "a", "-n", "1", "-c", "256", "-no-cnv"]
    (line,) = load_lines(alone("llama-completion", *call, KVQ_CACHE_DIR=str(tmp_path)))
    assert MEASURED in line
    argv[5] = str(tmp_path / "no.gguf")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 2 and "is not a file" in done.stderr, done.stderr


def test_every_model_of_a_bench_finds_its_own(cache: Path, demo_model: Path, tmp_path: Path) -> None:
    """With two models nobody knew which one a cache was of."""
    copy = tmp_path / "copy.gguf"
    shutil.copy(demo_model, copy)
    for models in (["-m", f"{demo_model},{copy}"], ["-m", str(demo_model), "-m", str(copy)]):
        lines = load_lines(alone("llama-bench", *models, "-p", "8", "-n", "0", "-r", "1"))
        assert len(lines) == 2 and all(MEASURED in line for line in lines), lines
    call = "import sys; from ggml_kvq.launch import launcher; sys.exit(launcher.llama_bench())"
    argv = [*models, "-p", "8", "-n", "0", "-r", "1", "-t", "1", "--kv-bits", "3"]
    done = subprocess.run([sys.executable, "-c", call, *argv], capture_output=True, text=True, timeout=300, check=False)
    lines = load_lines(done.stderr)
    assert done.returncode == 0 and len(lines) == 2 and all(MEASURED in line for line in lines), done.stderr[-2000:]


def split(model: Path, folder: Path) -> Path:
    """The model in two files, as llama.cpp names them: the first one."""
    reader = gguf.GGUFReader(model)
    half = len(reader.tensors) // 2
    for no, tensors in enumerate((reader.tensors[:half], reader.tensors[half:])):
        out = gguf.GGUFWriter(folder / f"m-{no + 1:05}-of-00002.gguf", "llama")
        for key, field in reader.fields.items():
            if key.startswith("GGUF.") or key == "general.architecture" or (no and not key.startswith("general.")):
                continue
            kind, sub = field.types[0], field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            out.add_key_value(key, field.contents(), kind, sub_type=sub)
        out.add_uint16("split.no", no)
        out.add_uint16("split.count", 2)
        out.add_int32("split.tensors.count", len(reader.tensors))
        for t in tensors:
            out.add_tensor(t.name, np.asarray(t.data), raw_dtype=t.tensor_type)
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_tensors_to_file()
        out.close()
    return folder / "m-00001-of-00002.gguf"


def test_a_model_of_several_files_is_measured_and_found(cache: Path, demo_model: Path, tmp_path: Path) -> None:
    first = split(demo_model, tmp_path)
    there, why = default_means.ensure(first, print, 1)
    assert there, why
    (line,) = load_lines(alone("llama-completion", "-m", str(first), "-p", "a", "-n", "1", "-c", "256", "-no-cnv"))
    assert MEASURED in line
    # its own file is not on the command line: the one that is mapped counts
    env = {"LLAMA_ARG_MODEL": str(first)}
    (line,) = load_lines(alone("llama-completion", "-p", "a", "-n", "1", "-c", "256", "-no-cnv", **env))
    assert MEASURED in line


# ------------------------------------------------------------------ routers


def test_a_router_names_its_models(demo_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    (folder / "big").mkdir(parents=True)
    for name in ("a.gguf", "mmproj-a.gguf", "a.kvq.gguf", "b-draft.gguf", "big/b-00001-of-00002.gguf"):
        (folder / name).write_bytes(b"")
    (folder / "big/b-00002-of-00002.gguf").write_bytes(b"")
    preset = tmp_path / "p.ini"
    preset.write_text(f"version = 1\n[one]\nmodel = {demo_model}\nctx-size = 512\n[two]\nhf-repo = owner/repo\n")
    args = ["--models-dir", str(folder), "--models-preset", str(preset)]
    found = router.models(User(args, {}, reads_env=True))
    assert found == [str(folder / "a.gguf"), str(folder / "big/b-00001-of-00002.gguf"), str(demo_model)]
    env = {"LLAMA_ARG_MODELS_DIR": str(folder)}
    assert router.models(User([], env, reads_env=True)) == found[:2]
    assert router.models(User(["--models-dir", "/no/such"], {}, reads_env=True)) == []


def test_a_routers_child_has_the_means(cache: Path, demo_model: Path, tmp_path: Path) -> None:
    """Children printed `auto [bits=3.5]` and no word of means, which the same model had with -m."""
    folder, log = tmp_path / "models", tmp_path / "log"
    folder.mkdir()
    shutil.copy(demo_model, folder / "demo.gguf")
    argv = ["--models-dir", str(folder), "--kv-bits", "3.5", "-c", "512", "-np", "1"]
    with server(*argv, log=log) as (address, _):
        body = json.dumps({"model": "demo", "prompt": "a", "max_tokens": 1}).encode()
        request = urllib.request.Request(address + "/v1/completions", body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=240).read()
    (line,) = re.findall(r"ggml-kvq: auto \[.*", log.read_text())
    assert line.startswith("ggml-kvq: auto [bits=3.5]") and MEASURED in line


def test_a_launcher_measures_what_its_router_may_load(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int | None]] = []

    def ensure(model: str, _say: object, n_threads: int | None, _line: object, **_: object) -> tuple[str, str]:
        seen.append((model, n_threads))
        return "x", ""

    monkeypatch.setattr(default_means, "ensure", ensure)
    monkeypatch.setenv("KVQ_CACHE_DIR", str(tmp_path))
    shutil.copy(demo_model, tmp_path / "demo.gguf")
    got = launcher.command("llama-server", ["--models-dir", str(tmp_path), "--kv-bits", "3", "-t", "1"], {})
    assert seen == [(str(tmp_path / "demo.gguf"), 1)] and got.env["KVQ_CONFIG"] is None


# ------------------------------------------------------------------ damage, SIGTERM


def test_a_damaged_file_is_measured_again_and_says_so(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stopped every start: "make it again with ggml-kvq calibrate"."""
    monkeypatch.setenv("KVQ_CACHE_DIR", str(tmp_path))
    first, _ = default_means.ensure(demo_model, print, 1, kind=FirstUse.COORDINATES)
    there = Path(str(first))
    whole = there.read_bytes()
    for damaged in (whole[:-100] + bytes([whole[-100] ^ 0x40]) + whole[-99:], whole[:5000], b"GGUF", b""):
        there.write_bytes(damaged)
        said = alone("llama-completion", "-m", str(demo_model), "-p", "a", "-n", "1", "-c", "256", "-no-cnv")
        assert "they are not used" in said and "nothing is known of this model's keys" in said
        with Model(demo_model, kv_bits=3, n_ctx=256, n_threads=1) as m:
            assert MEASURED in m.load_line
        assert there.read_bytes() == whole
    lines: list[str] = []
    there.write_bytes(whole[:5000])
    again, why = default_means.ensure(demo_model, lines.append, 1, kind=FirstUse.COORDINATES)
    assert again == str(there) and not why and "it is measured again" in lines[0] and str(there) in lines[0]


def test_a_good_file_serves_beside_a_damaged_one(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either of means and coordinates, for the library alone."""
    monkeypatch.setenv("KVQ_CACHE_DIR", str(tmp_path))
    paths = [default_means.ensure(demo_model, print, 1, kind=k)[0] for k in (FirstUse.MEANS, FirstUse.COORDINATES)]
    means, coordinates = (Path(str(x)) for x in paths)
    whole = coordinates.read_bytes()
    coordinates.write_bytes(whole[:5000])
    call = ["-m", str(demo_model), "-p", "a", "-n", "1", "-c", "256", "-no-cnv"]
    said = alone("llama-completion", *call)
    assert "they are not used" in said and MEASURED in said and "coordinates a head" not in said
    coordinates.write_bytes(whole)
    means.write_bytes(b"GGUF")
    assert "coordinates a head" in alone("llama-completion", *call)


def test_means_serve_where_coordinates_cannot_be_written(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVQ_CACHE_DIR", str(tmp_path))
    means, _ = default_means.ensure(demo_model, print, 1)
    real = disk.probe

    def probe(path: Path) -> None:
        if str(path) != means:
            raise KvqError(f"{path} cannot be written")
        real(path)

    monkeypatch.setattr(disk, "probe", probe)
    with Model(demo_model, kv_bits=3, n_ctx=256, n_threads=1) as m:
        assert MEASURED in m.load_line and "channel means are taken off" in m.load_line
    assert "without coordinates: " in capfd.readouterr().err
    with pytest.raises(KvqError, match="coordinates are asked for .*cannot be written"):
        Model(demo_model, kv_bits=3, kv_opts="coordinates=on", n_ctx=256, n_threads=1)


def test_a_model_that_can_have_no_coordinates(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads that turn in part: means alone after one pass, and an error for who insists, at any time."""
    monkeypatch.setenv("KVQ_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(capture, "pairs", lambda *_: "none")
    for _ in range(2):
        there, why = default_means.ensure(demo_model, print, 1, kind=FirstUse.COORDINATES, insist=False)
        assert there and not why and there.endswith(FirstUse.COORDINATES.ending)
        none, why = default_means.ensure(demo_model, print, 1, kind=FirstUse.COORDINATES)
        assert none is None and "keys that turn as a whole" in why
    with Model(demo_model, kv_bits=3, n_ctx=256, n_threads=1) as m:
        assert MEASURED in m.load_line and "coordinates" not in m.load_line


def test_data_of_an_older_version_are_measured_again(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of sorted keys without the order in which layers rise."""
    monkeypatch.setenv("KVQ_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(halves, "checked", lambda path, fitted, *_, **__: replace(fitted, pairs="sorted"))
    first, _ = default_means.ensure(demo_model, print, 1)
    there, said = Path(str(first)), list[str]()
    whole = there.read_bytes()
    assert default_means.ensure(demo_model, said.append, 1)[0] == first and not said
    with monkeypatch.context() as older:
        older.setattr(halves, "checked", lambda path, fitted, *_, **__: replace(fitted, pairs="sorted", climb="none"))
        there.unlink()
        default_means.ensure(demo_model, print, 1)
    assert there.read_bytes() != whole
    assert default_means.ensure(demo_model, said.append, 1)[0] == first and len(said) == 1
    assert there.read_bytes() == whole


FIRST = "import sys; from ggml_kvq import default_means; print(default_means.ensure(sys.argv[1], print, 1))"


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_an_end_in_between_leaves_nothing(demo_model: Path, tmp_path: Path, kind: signal.Signals) -> None:
    env = {**os.environ, "KVQ_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", FIRST, str(demo_model)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    for _ in range(2000):
        if list(tmp_path.glob("kvq-halves-*/*.gguf")) or process.poll() is not None:
            break
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()
    process.send_signal(kind)
    process.communicate(timeout=60)
    assert process.returncode in (-kind, 1) and not list(tmp_path.glob("kvq-halves-*"))
    assert not list((tmp_path / "cache").rglob("*.gguf"))


# ------------------------------------------------------------------ threads, progress


def test_as_many_threads_as_the_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """os.cpu_count() counts CPUs that a container or taskset keeps from it: threads that spin beside others."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
    group = tmp_path / "proc"

    monkeypatch.setattr(cpus, "GROUPS", group)
    monkeypatch.setattr(cpus, "ROOT", tmp_path)

    def allowed(text: str, **files: str) -> int:
        group.write_text(text)
        for name, content in files.items():
            file = tmp_path / name.replace("__", "/").replace("cpu_", "cpu.")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        return cpus.available()

    assert allowed("0::/\n") == 16
    assert allowed("0::/a/b\n", a__b__cpu_max="max 100000\n") == 16
    assert allowed("0::/a/b\n", a__b__cpu_max="350000 100000\n") == 3
    assert allowed("0::/a/b\n", a__cpu_max="150000 100000\n") == 1  # the group above
    first = {"cpu__x__cpu_cfs_quota_us": "400000\n", "cpu__x__cpu_cfs_period_us": "100000\n"}
    assert allowed("4:cpu,cpuacct:/x\n2:memory:/x\n", **first) == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3})
    assert allowed("0::/\n") == 1
    group.unlink()
    assert cpus.available() == 1


@pytest.mark.parametrize("argv", [["-t", "1"], ["--threads", "1"]])
def test_first_use_takes_the_callers_threads(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    """With -t 1 beside other work SmolLM2 took 71 to 139 seconds in threads that nobody asked for, 20 in one."""
    from ggml_kvq.calibrate import capture, halves

    asked: list[int | None] = []
    monkeypatch.setenv("KVQ_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(capture, "open_model", opened(capture.open_model, asked))
    monkeypatch.setattr(halves, "_open", opened(halves._open, asked))
    launcher.command("llama-cli", ["-m", str(demo_model), "--kv-bits", "3", *argv], {})
    assert len(asked) == 4 and set(asked) == {1}  # capture, f16, with coordinates, without
    asked.clear()
    default_means.path_of(demo_model, FirstUse.COORDINATES).unlink()
    Model(demo_model, kv_bits=3, n_ctx=256, n_threads=1).close()
    assert len(asked) == 4 and set(asked) == {1}  # capture, f16, with coordinates, without


def opened(call: Callable[..., Model], asked: list[int | None]) -> Callable[..., Model]:
    def keep(*args: object) -> Model:
        asked.append(args[-1])  # type: ignore[arg-type]
        return call(*args)

    return keep


def test_progress_and_an_estimate_are_shown(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVQ_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    default_means.ensure(demo_model, print, 1, progress.Line())
    shares = [
        int(x) for x in re.findall(r"measuring kvq-demo-q8_0.gguf: (\d+) %, about \d+ s left", capfd.readouterr().err)
    ]
    assert shares == sorted(shares) and shares[0] == 10 and shares[-1] == 100 and len(shares) > 10


def test_two_that_start_at_once_measure_whole_files(demo_model: Path, tmp_path: Path) -> None:
    """Servers that are started together: each gets a whole file, whoever writes it last."""
    env = {**os.environ, "KVQ_CACHE_DIR": str(tmp_path)}
    calls = [[sys.executable, "-c", FIRST, str(demo_model)] for _ in range(2)]
    processes = [subprocess.Popen(c, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in calls]
    for process in processes:
        out, err = process.communicate(timeout=240)
        assert ".kvq.gguf', '')" in out, err
    assert len(list(tmp_path.rglob("*.kvq.gguf"))) == 1


def test_the_text_that_is_measured_on_is_that_of_its_edition() -> None:
    """Another text makes other data: EDITION in gguf/measured.cpp has to change with it."""
    import hashlib

    source = (Path(__file__).parents[1] / "ggml-kvq/gguf/measured.cpp").read_text()
    assert 'EDITION = "sorted 1"' in source
    assert hashlib.sha256(default_means.TEXT.read_bytes()).hexdigest()[:16] == "f5ab7a090562cf09"


# ------------------------------------------------------------------ weights


def test_weights_are_mapped_as_without_us(demo_model: Path) -> None:
    """llama.cpp read the file into memory of its own: our device did not say that weights may be mapped."""
    for method in ("upstream", "kivi"):
        with Model(demo_model, method, n_ctx=256, n_threads=1):
            assert str(demo_model) in Path("/proc/self/maps").read_text(), method


@pytest.mark.parametrize("variable", ["KVQ_CACHE_DIR", "XDG_CACHE_HOME", "HOME", ""])
def test_the_folder_is_the_one_of_python(variable: str, demo_model: Path, tmp_path: Path) -> None:
    """The library and Python name it apart from each other; a service may run without $HOME."""
    code = (
        "import sys; from ggml_kvq import default_means as d; print(d.path_of(sys.argv[1]).parent); print(d.folder())"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("KVQ_CACHE_DIR", "XDG_CACHE_HOME", "HOME")}
    env |= {variable: str(tmp_path)} if variable else {}
    call = [sys.executable, "-c", code, str(demo_model)]
    first, second = subprocess.run(call, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    assert first == second and (not variable or first.startswith(str(tmp_path))) and first.endswith("/means")
