"""What llama-server shows of the cache: --kv-stats-file, and the page at /, in a headless browser where one is
installed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ggml_kvq import _paths
from ggml_kvq.errors import KvqError
from ggml_kvq.launch import launcher

CALL = "import sys; from ggml_kvq.launch.launcher import run; sys.exit(run('llama-server', sys.argv[1:]))"
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@contextmanager
def server(*argv: str, log: Path, env: dict[str, str] | None = None) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Address and process of a llama-server behind the launcher, once it answers."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with open(log, "wb") as f:
        process = subprocess.Popen(
            [sys.executable, "-c", CALL, "--port", str(port), "-t", "2", *argv],
            env={**os.environ, **(env or {})},
            stdout=f,
            stderr=subprocess.STDOUT,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(address + "/health", timeout=5).read()
                break
            except OSError:
                assert process.poll() is None, log.read_text()[-3000:]
                time.sleep(0.2)
        yield address, process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def complete(address: str, prompt: str, n: int) -> None:
    body = json.dumps({"prompt": prompt, "n_predict": n, "temperature": 0}).encode()
    request = urllib.request.Request(address + "/completion", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=120).read()


def test_the_stats_file_tells_what_the_cache_holds(demo_model: Path, tmp_path: Path) -> None:
    stats = tmp_path / "kv.json"
    argv = [
        "-m",
        str(demo_model),
        "--kv-method",
        "kivi",
        "--kv-opt",
        "bits=2",
        "-c",
        "4096",
        "-np",
        "2",
        "-no-kvu",
        "--kv-stats-file",
        str(stats),
    ]
    with server(*argv, log=tmp_path / "log") as (address, process):
        first = json.loads(stats.read_text())
        [cache] = first["caches"]
        assert first["version"] == 1 and first["pid"] == process.pid
        assert (cache["method"], cache["options"], cache["layers"], cache["tokens"], cache["slots"]) == (
            "kivi",
            "bits=2",
            12,
            2048,
            2,
        )
        assert cache["sealed_pages"] == 0 and 0 < cache["bytes_total"] < cache["bytes_f16"]
        assert cache["bits"] == pytest.approx(cache["bytes_total"] * 16 / cache["bytes_f16"], rel=1e-4)
        assert "2048 tokens x 2 slots" in cache["line"] and cache["line"] in (tmp_path / "log").read_text()
        complete(address, "The file is read by the program. " * 60, 8)
        for _ in range(50):
            now = json.loads(stats.read_text())  # whole at any time
            if now["caches"][0]["sealed_pages"]:
                break
            time.sleep(0.2)
        assert now["caches"][0]["sealed_pages"] >= 24 and now["time"] >= first["time"]
    [last] = json.loads(stats.read_text())["caches"]  # the last figures stay
    assert last["sealed_pages"] >= 24 and abs(last["freed"] - time.time()) < 60
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kv.json", "log"]


def test_a_cache_that_is_gone_says_so(demo_model: Path, tmp_path: Path) -> None:
    """A sleeping server has given its cache back; the file went on listing it as it was."""
    stats = tmp_path / "kv.json"
    argv = ["-m", str(demo_model), "--kv-method", "kivi", "-c", "1024", "--sleep-idle-seconds", "1"]

    def wait(freed: bool) -> dict[str, Any]:
        for _ in range(100):
            now: dict[str, Any] = json.loads(stats.read_text())
            if all(("freed" in c) == freed for c in now["caches"]):
                return now
            time.sleep(0.2)
        raise AssertionError(now)

    with server(*argv, "--kv-stats-file", str(stats), log=tmp_path / "log") as (address, _):
        complete(address, "The file", 4)
        asleep = wait(freed=True)
        assert len(asleep["caches"]) == 1 and asleep["time"] >= asleep["caches"][0]["freed"]
        for _ in range(50):  # it is written again while the server sleeps
            if json.loads(stats.read_text())["time"] > asleep["time"]:
                break
            time.sleep(0.2)
        assert json.loads(stats.read_text())["time"] > asleep["time"]
        complete(address, "The file", 4)
        assert len(wait(freed=False)["caches"]) == 1


def test_a_stats_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for bad in (tmp_path / "no" / "x.json", tmp_path):
        with pytest.raises(KvqError, match="--kv-stats-file .* cannot be written"):
            launcher.command("llama-server", ["--kv-method", "f16", "--kv-stats-file", str(bad)], {})
    with pytest.raises(KvqError, match="--kv-stats-file x needs a method"):
        launcher.command("llama-server", ["--kv-stats-file", "x"], {})


def test_the_user_may_serve_his_own_page(tmp_path: Path) -> None:
    for argv in (["--path", str(tmp_path)], ["--no-webui"], ["--no-ui"]):
        got = launcher.command("llama-server", ["--kv-method", "f16", *argv], {})
        assert got.page is None and got.args.count("--path") == argv.count("--path")
    assert launcher.command("llama-server", ["--kv-method", "f16"], {"LLAMA_ARG_STATIC_PATH": "/x"}).page is None
    assert launcher.command("llama-cli", ["--kv-method", "f16"], {}).page is None


def browse(browser: str, url: str, profile: Path) -> str:
    """The document once the answer is complete. Virtual time runs ahead of a busy server: then more of it."""
    for budget in (300_000, 3_000_000, 30_000_000):
        argv = [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={profile}",
            f"--virtual-time-budget={budget}",
            "--dump-dom",
            url,
        ]
        dom = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True).stdout
        if 'data-done="yes"' in dom:
            break
    return dom


@pytest.mark.skipif(_paths.page_dir() is None, reason="llama.cpp's own page is built in")
def test_the_page_chats_and_shows_the_cache(demo_model: Path, tmp_path: Path) -> None:
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with server(
        "-m",
        str(demo_model),
        "--kv-method",
        "xquant",
        "-c",
        "2048",
        "-n",
        "24",
        "--temp",
        "0",
        log=tmp_path / "log",
        env=env,
    ) as (address, _):
        with urllib.request.urlopen(address + "/", timeout=10) as r:
            assert r.status == 200 and b"llama-server with ggml-kvq" in r.read()
        with urllib.request.urlopen(address + "/kv-stats.json", timeout=10) as r:
            cache = json.loads(r.read())["caches"][0]
            assert cache["method"] == "xquant"
        with urllib.request.urlopen(address + "/kv-metrics.txt", timeout=10) as r:
            assert r.headers["Content-Type"].startswith("text/plain")
            lines = r.read().decode().splitlines()
        assert f'ggml_kvq_cache_bytes{{cache="0",method="xquant"}} {cache["bytes_total"]}' in lines
        assert "# TYPE ggml_kvq_sealed_pages_total counter" in lines
        if not browser:
            pytest.skip("no Chromium to look at the page (apt-get install chromium)")
        url = f"{address}/?ask={urllib.parse.quote('The file is read by the')}"
        dom = browse(browser, url, tmp_path / "profile")
    answer = re.search(r'<p class="turn assistant"[^>]*>(.*?)</p>', dom, re.DOTALL)
    assert answer and len(answer[1].strip()) > 10, dom[-3000:]
    assert 'class="turn error"' not in dom
    line = re.search(r'<p id="line">(.*?)</p>', dom, re.DOTALL)
    assert line and line[1].startswith("ggml-kvq: xquant, K 3.") and "2048 tokens" in line[1], dom
    for name, value in (("method", "xquant"), ("layers", "12"), ("memory", " MiB instead of "), ("sealed pages", "")):
        shown = re.search(rf'<dd data-name="{name}">(.*?)</dd>', dom)
        assert shown and value in shown[1], dom


@pytest.mark.skipif(_paths.page_dir() is None, reason="llama.cpp's own page is built in")
def test_without_a_method_the_page_says_so_and_old_folders_go(demo_model: Path, tmp_path: Path) -> None:
    gone = tmp_path / f"ggml-kvq-page-{os.getuid()}-4194303"
    gone.mkdir()
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with server("-m", str(demo_model), "-c", "256", log=tmp_path / "log", env=env) as (address, _):
        assert urllib.request.urlopen(address + "/", timeout=10).status == 200
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(address + "/kv-stats.json", timeout=10)
    assert gone.exists()  # nothing of ours was needed here
    with server("-m", str(demo_model), "-c", "256", "--kv-method", "f16", log=tmp_path / "log", env=env):
        assert not gone.exists() and len(list(tmp_path.glob("ggml-kvq-page-*/index.html"))) == 1
    assert not list(tmp_path.glob("ggml-kvq-page-*"))  # the server took its folder away
