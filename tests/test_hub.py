"""hf: paths against a local stand-in of the hub: download once, then the cache; every failure names its cure."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from ggml_kvq import errors, hub

CONTENT = b"GGUF" + bytes(range(256)) * 64
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class StandIn(http.server.BaseHTTPRequestHandler):
    """The two requests hf_hub_download makes: HEAD with commit, ETag and size, then GET."""

    seen: list[str] = []  # noqa: RUF012 - shared by design, cleared by the fixture

    def reply(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer(self) -> None:
        path = unquote(self.path.split("?")[0])
        self.seen.append(f"{self.command} {path}")
        if path == "/owner/repo/resolve/main/sub/model.gguf":
            etag = hashlib.sha256(CONTENT).hexdigest()
            self.reply(
                200, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "Content-Length": str(len(CONTENT))}, CONTENT
            )
        elif path.startswith("/api/models/owner/repo/tree/main"):
            names = ["README.md", "sub/model.gguf", "sub/mmproj-model.gguf"]
            body = json.dumps([{"type": "file", "path": n, "size": 1, "oid": "0" * 40} for n in names]).encode()
            self.reply(200, {"Content-Type": "application/json"}, body)
        elif path.startswith("/owner/repo/resolve/main/"):
            self.reply(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        elif path.startswith("/owner/repo/"):
            self.reply(404, {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith("/owner/gated/"):
            self.reply(403, {"X-Error-Code": "GatedRepo"})
        else:
            self.reply(404, {"X-Error-Code": "RepoNotFound"})

    do_GET = do_HEAD = answer

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    StandIn.seen.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_downloads_once_then_uses_the_cache(endpoint: str, tmp_path: Path) -> None:
    path = hub.fetch("hf:owner/repo/sub/model.gguf", cache_dir=tmp_path, endpoint=endpoint)
    assert path.read_bytes() == CONTENT and path.name == "model.gguf"
    gets = [s for s in StandIn.seen if s.startswith("GET")]
    assert len(gets) == 1
    assert hub.fetch("hf:owner/repo/sub/model.gguf", cache_dir=tmp_path, endpoint=endpoint) == path
    assert [s for s in StandIn.seen if s.startswith("GET")] == gets


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("hf:owner/repo/other.gguf", ["owner/repo", "other.gguf", "tree/main"]),
        ("hf:owner/repo/sub/model.gguf@old", ["owner/repo", "old"]),
        ("hf:owner/none/model.gguf", ["owner/none", "check the name"]),
        ("hf:owner/gated/model.gguf", ["owner/gated", "hf auth login"]),
    ],
)
def test_failures_name_the_cure(endpoint: str, tmp_path: Path, spec: str, parts: list[str]) -> None:
    with pytest.raises(errors.DownloadError) as caught:
        hub.fetch(spec, cache_dir=tmp_path, endpoint=endpoint)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_no_network_is_said_plainly(tmp_path: Path) -> None:
    """And at once: huggingface_hub would wait 23 seconds before it says so."""
    began = time.monotonic()
    with pytest.raises(errors.DownloadError, match="check the network"):
        hub.fetch("hf:owner/repo/sub/model.gguf", cache_dir=tmp_path, endpoint="http://127.0.0.1:9")
    assert time.monotonic() - began < 8


@pytest.mark.parametrize(
    "spec", ["hf:model.gguf", "hf:owner/repo", "hf:owner/repo/file.bin", "hf:owner/../x.gguf", "hf:/a/b.gguf"]
)
def test_malformed_paths_are_refused_before_any_request(spec: str) -> None:
    with pytest.raises(errors.DownloadError, match="hf:owner/repo/file.gguf"):
        hub.fetch(spec)


def test_a_repository_is_asked_for_its_files(endpoint: str, tmp_path: Path) -> None:
    """In another process: huggingface_hub reads its variables when it is imported. Then without a network: the
    cache answers, at once and without a word.
    """
    code = (
        "import sys; from ggml_kvq import hub;"
        " path, projector = hub.choose('owner/repo', sys.argv[1]); print(path, projector is not None)"
    )
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)}
    for where in (endpoint, "http://127.0.0.1:9"):
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", code, ""],
            env={**env, "HF_ENDPOINT": where},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert where == endpoint or (time.monotonic() - began < 8 and not done.stderr), done.stderr
        path, projector = done.stdout.split()
        assert Path(path).read_bytes() == CONTENT and projector == str(
            where == endpoint
        )  # only what was downloaded is known
    done = subprocess.run([sys.executable, "-c", code, "Q9"], env=env, capture_output=True, text=True, timeout=120)
    assert "no GGUF file of Q9; it has sub/model.gguf" in done.stderr


def test_local_paths_pass_through(tmp_path: Path) -> None:
    assert hub.resolve(tmp_path / "x.gguf") == tmp_path / "x.gguf"
