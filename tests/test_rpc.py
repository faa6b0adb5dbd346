"""Layers on other machines, by llama.cpp's RPC backend: two servers on the loopback address and the local device."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import ROOT

DEMO = str(ROOT / "models" / "kvq-demo-q8_0.gguf")  # 12 layers
TEXT = str(ROOT / "tests" / "data" / "walk.txt")
EVEN, ODD = (
    "4,4,5",
    "5,4,4",
)  # of 13, the output counts as a layer: pairs of layers stay together, and two are cut apart
LAUNCH = "import sys; from ggml_kvq.launch import launcher; sys.exit(getattr(launcher, sys.argv.pop(1))())"
# A crash prints no backtrace through a debugger; weights are kept as they are in the file, as an RPC server keeps them.
ENV = {**os.environ, "GGML_NO_BACKTRACE": "1", "OMP_NUM_THREADS": "1"}
LOAD_LINE = re.compile(r"^ggml-kvq: (\w+).* (\d+) tokens(?: x \d+ slots)?, device (\w+)", re.MULTILINE)


def run(program: str, *args: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LAUNCH, program, *args],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        check=False,
    )


class Server:
    """A llama-rpc-server on a free port."""

    def __init__(self, folder: Path, *args: str) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.log = folder / f"server-{self.port}.log"
        command = [sys.executable, "-c", LAUNCH, "llama_rpc_server", "-p", str(self.port), "-t", "1", *args]
        with open(self.log, "w") as out:
            self.process = subprocess.Popen(command, env=ENV, stdout=out, stderr=out)
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection((self.address.partition(":")[0], self.port), timeout=1).close()
                return
            except OSError:
                assert self.process.poll() is None and time.monotonic() < deadline, self.said()
                time.sleep(0.05)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def two_servers(folder: Path, *args: str) -> Iterator[list[Server]]:
    servers: list[Server] = []
    try:
        for _ in range(2):
            servers.append(Server(folder, *args))
        yield servers
    finally:
        for s in servers:
            s.stop()


def addresses(servers: Sequence[Server]) -> str:
    return ",".join(s.address for s in servers)


# llama.cpp writes its log by a thread of its own, and now and then a program ends before its last lines are written.


def perplexity(*args: str) -> tuple[float, str]:
    common = ["-m", DEMO, "-f", TEXT, "-c", "512", "--chunks", "3", "-t", "1", "--no-repack"]
    for _ in range(5):
        done = run("llama_perplexity", *common, *args)
        assert done.returncode == 0, done.stderr[-3000:]
        if found := re.search(r"PPL = ([0-9.]+)", done.stdout + done.stderr):
            return float(found[1]), done.stderr
    raise AssertionError(done.stderr[-3000:])


def completion(*args: str) -> str:
    common = ["-m", DEMO, "-n", "150", "--temp", "0", "-no-cnv", "-t", "1", "--no-repack"]
    done = run("llama_completion", *common, "-p", "Memory is allocated with malloc(3), which", *args)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def one_text(a: str, b: str) -> bool:
    """Is one the beginning of the other, and most of it?"""
    short, long = sorted((a.rstrip(), b.rstrip()), key=len)
    return len(short) > 300 and len(short) > len(long) // 2 and long.startswith(short)


@pytest.mark.parametrize("method", ["f16", "kivi", "xquant"])
def test_three_devices_give_what_one_gives(method: str, tmp_path: Path) -> None:
    flags = ["--kv-method", method]
    alone, said = perplexity(*flags)
    assert [m[2] for m in LOAD_LINE.findall(said)] == ["KVQ0"]
    with two_servers(tmp_path, *flags, "--kv-model", DEMO) as servers:
        shared, said = perplexity(*flags, "--rpc", addresses(servers), "-ts", EVEN)
        text = completion(*flags, "--rpc", addresses(servers), "-ts", EVEN)
        for lines in (said, *(s.said() for s in servers)):
            assert [m[0] for m in LOAD_LINE.findall(lines)][:1] == [method], lines
        assert f"layers on {addresses(servers)} are cached as their servers were started" in said
        if method == "xquant":
            cut, said = perplexity(*flags, "--rpc", addresses(servers), "-ts", ODD)
            notes = [re.findall(r"; (layers? [\d ]+) keeps? codes of its own", s.said()) for s in servers]
            assert "layer 9 keeps codes of its own" in said and notes[0] == [], (said, notes)
            assert abs(cut / alone - 1) < 0.05 and cut != alone
    assert shared == alone
    assert one_text(text, completion(*flags))


@pytest.mark.parametrize(("method", "declared"), [("kivi", "q4_0"), ("higgs", "q8_0"), (None, "q5_0")])
def test_a_declared_type_reaches_the_servers(method: str | None, declared: str, tmp_path: Path) -> None:
    """-ctk and -ctv of the client: what the servers allocate, and what they hold is what one device holds. A client
    without a method gets the servers'."""
    types = ["-ctk", declared, "-ctv", declared, "-fa", "on"]
    flags = ["--kv-method", method] if method else []
    alone, _ = perplexity("--kv-method", method or "kivi", *types)
    with two_servers(tmp_path, "--kv-method", method or "kivi") as servers:
        devices = [] if method else ["-dev", "RPC0,RPC1"]
        shared, _ = perplexity(*flags, *types, "--rpc", addresses(servers), *devices)
        assert all(LOAD_LINE.findall(s.said()) for s in servers), [s.said() for s in servers]
        texts = []
        far = [*flags, "--rpc", addresses(servers), *devices]
        for name, where in (("far", far), ("near", ["--kv-method", method or "kivi"])):
            state = ["--prompt-cache", str(tmp_path / name), *types]
            runs = (["--prompt-cache-all"], ["--prompt-cache-ro"])
            texts.append([completion(*where, *state, *more).replace(state[1], "") for more in runs])
    assert shared == alone
    assert all(one_text(*pair) for pair in zip(*texts)), texts


def test_two_streams_context_shift_and_saved_states(tmp_path: Path) -> None:
    flags = ["--kv-method", "kivi", "--kv-opt", "window=64"]
    with two_servers(tmp_path, *flags) as servers:
        far = ["--rpc", addresses(servers), "-ts", EVEN]
        assert perplexity(*flags, *far, "-b", "1024")[0] == perplexity(*flags, "-b", "1024")[0]
        shift = ["-c", "256", "-n", "400", "--context-shift"]
        assert one_text(completion(*flags, *far, *shift), completion(*flags, *shift))
        texts = []
        for name, where in (("far", far), ("near", [])):
            state = ["--prompt-cache", str(tmp_path / name)]
            runs = (["--prompt-cache-all"], ["--prompt-cache-ro"], ["--prompt-cache-ro", "--no-warmup"])
            texts.append([completion(*flags, *where, *state, *more).replace(state[1], "") for more in runs])
        assert all(one_text(*pair) for pair in zip(*texts)), texts
    assert all("error" not in s.said() for s in servers)


def test_a_client_without_method_gets_the_servers_cache(tmp_path: Path) -> None:
    with two_servers(tmp_path, "--kv-method", "kivi") as servers:
        alone, far = (
            perplexity("-fa", "on")[0],
            perplexity("--rpc", addresses(servers), "-dev", "RPC0,RPC1", "-fa", "on")[0],
        )
        assert far != alone and abs(far / alone - 1) < 0.2
        assert sum(int(n) for s in servers for n in re.findall(r"kivi.*?(\d+) tokens", s.said())[:1]) == 2 * 512
        off = run(
            "llama_completion",
            "-m",
            DEMO,
            "-p",
            "x",
            "-n",
            "1",
            "-no-cnv",
            "--rpc",
            servers[0].address,
            "-dev",
            "RPC0",
            "-fa",
            "off",
        )
        assert off.returncode != 0 and "run the client with -fa on" in servers[0].said()


def test_a_server_that_dies_ends_the_client(tmp_path: Path) -> None:
    with two_servers(tmp_path, "--kv-method", "kivi") as servers:
        args = [
            "-m",
            DEMO,
            "-p",
            "The",
            "-n",
            "100000",
            "-c",
            "4096",
            "--context-shift",
            "--ignore-eos",
            "-no-cnv",
            "-t",
            "1",
        ]
        command = [
            sys.executable,
            "-c",
            LAUNCH,
            "llama_completion",
            *args,
            "--kv-method",
            "kivi",
            "--rpc",
            addresses(servers),
        ]
        with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as client:
            assert client.stdout
            assert len(client.stdout.read(200)) == 200  # it writes
            servers[1].stop()
            try:
                said = client.communicate(timeout=30)[1].decode(errors="replace")
            finally:
                client.kill()
            assert client.returncode == -signal.SIGABRT and "RPC server crashed" in said, said[-2000:]
        assert servers[0].process.poll() is None
        text = completion("--kv-method", "kivi", "--rpc", servers[0].address)  # the other one serves on
        assert "malloc" in text


@pytest.mark.parametrize("server", ["127.0.0.1:1", "127.0.0.1", "127.0.0.1:http", ":50052", "127.0.0.1:70000"])
def test_a_wrong_address_is_one_line(server: str) -> None:
    for method in ([], ["--kv-method", "kivi"]):
        done = run("llama_completion", "-m", DEMO, "--rpc", server, *method)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and server in done.stderr, done.stderr
        assert "llama-rpc-server" in done.stderr or "HOST:PORT" in done.stderr


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--kv-method", "kivi", "-d", "CPU"], ["-d CPU", "KVQ0"]),
        (["--kv-method", "nothing"], ["nothing"]),
        (["--kv-method", "kivi", "--kv-model", "/nowhere.gguf"], ["--kv-model /nowhere.gguf"]),
        (["--kv-method", "kivi", "--kv-model"], ["--kv-model", "FILE.gguf"]),
        (["--kv-opt", "bits=2"], ["--kv-opt bits=2", "--kv-method"]),
    ],
)
def test_refusals_of_the_server(argv: list[str], words: list[str]) -> None:
    done = run("llama_rpc_server", *argv)
    assert done.returncode == 2 and done.stderr.startswith("llama-rpc-server: error: ") and done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in words), done.stderr


def test_the_documented_commands(tmp_path: Path) -> None:
    lines = (ROOT / "docs" / "llama-cpp.md").read_text().splitlines()
    serve, ask = (
        next(x for x in lines if x.startswith(f"    {name}") and "192.168" in x) for name in ("llama-rpc", "llama-cli")
    )
    words = shlex.split(serve.replace("192.168.1.2", "127.0.0.1").replace("model.gguf", DEMO))[1:]
    i = words.index("-p")
    server = Server(tmp_path, *words[:i], *words[i + 2 :])
    try:
        words = shlex.split(ask.replace("192.168.1.2:50052", server.address).replace("model.gguf", DEMO))[1:]
        done = run("llama_cli", *words, "-n", "8", "-st")
    finally:
        server.stop()
    assert done.returncode == 0 and LOAD_LINE.findall(done.stderr) and LOAD_LINE.findall(server.said()), done.stderr[
        -2000:
    ]


def post(port: int, path: str, **body: object) -> dict[str, object]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        got: dict[str, object] = json.load(reply)
    return got


def second_slot(folder: Path, *args: str) -> list[object]:
    """What llama-server's second slot says before it is saved, and when it was overwritten and restored."""
    folder.mkdir()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = ["-m", DEMO, "-c", "1024", "-np", "2", "-t", "1", "--no-repack", "--slot-save-path", str(folder)]
    command = [sys.executable, "-c", LAUNCH, "llama_server", *common, "--port", str(port), *args]
    with open(folder / "log", "w") as log, subprocess.Popen(command, env=ENV, stdout=log, stderr=log) as server:
        try:
            for _ in range(300):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
                    break
                except OSError:
                    assert server.poll() is None, (folder / "log").read_text()[-3000:]
                    time.sleep(0.1)
            prompt = Path(TEXT).read_text()[:900]
            ask = {"n_predict": 24, "temperature": 0, "cache_prompt": True}
            said = [post(port, "/completion", prompt=prompt, id_slot=1, **ask)["content"]]
            post(port, "/slots/1?action=save", filename="state")
            post(port, "/completion", prompt="Something else. " * 60, id_slot=1, **ask)
            restored = post(port, "/slots/1?action=restore", filename="state")
            assert int(str(restored["n_restored"])) > 200
            said.append(post(port, "/completion", prompt=prompt, id_slot=1, **ask)["content"])
        finally:
            server.kill()
    return said


def test_a_slot_of_two_is_saved_and_restored(tmp_path: Path) -> None:
    flags = ["--kv-method", "kivi", "--kv-opt", "window=64"]
    with two_servers(tmp_path, *flags) as servers:
        far = second_slot(tmp_path / "far", *flags, "--rpc", addresses(servers), "-ts", EVEN)
    near = second_slot(tmp_path / "near", *flags)
    assert far == near and all(far)
