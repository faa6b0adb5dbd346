#!/usr/bin/env python3
"""Speed over RPC: a server with llama.cpp's f16 cache and servers with ours, in turns, on this machine.

    bench_rpc.py --lib build/lib -m MODEL.gguf --devices CUDA0,KVQ0 --arms "kivi:bits=2:group=128,auto:bits=2.25"
                 [--depths 8192,32768] [--prompt 8192] [--gen 64] [--rounds 2] [--declare q4_0] [-t 2]

Each arm is upstream's ggml-rpc-server: the first offers the first device, the others load the library and offer the
second. The client is upstream's llama-bench without the library. --rounds: how often the arms take turns; the medians
are shown. MiB is the
most that the server used beyond its start, weights too: of the GPU, or of its resident set.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UPSTREAM = "upstream"
Row = dict[str, float]  # "pp 8192" or "tg at 8192": tokens a second; "MiB": memory of the server


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def used_mib(pid: int, gpu: bool) -> float:
    if gpu:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
        return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024


@contextmanager
def server(arm: str, a: argparse.Namespace, port: int, log: Path) -> Iterator[int]:
    """Starts the arm's server; gives its process number."""
    env = dict(os.environ, LD_LIBRARY_PATH=str(a.lib))
    device = a.devices[0]
    if arm != UPSTREAM:
        method, _, opts = arm.partition(":")
        env |= {"GGML_BACKEND_PATH": str(a.lib / "libggml-kvq.so"), "KVQ_METHOD": method, "KVQ_MODEL": str(a.model)}
        env["KVQ_OPTS"] = opts.replace(":", ",")
        device = a.devices[1]
    command = [str(a.lib / "ggml-rpc-server"), "-H", "127.0.0.1", "-p", str(port), "-d", device]
    if device in ("CPU", "KVQ0") and "CPU" in a.devices:
        command += ["-t", str(a.threads)]
    with log.open("w") as out, subprocess.Popen(command, env=env, stdout=out, stderr=out) as process:
        try:
            for _ in range(600):
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    if process.poll() is not None:
                        sys.exit(f"{arm}: the server ended:\n{log.read_text()[-2000:]}")
                    time.sleep(0.1)
            yield process.pid
        finally:
            process.kill()


@contextmanager
def peak(pid: int, gpu: bool) -> Iterator[list[float]]:
    """[the most memory that the server used meanwhile], MiB"""
    found, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            found[0] = max(found[0], used_mib(pid, gpu))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def client(a: argparse.Namespace, port: int) -> Row:
    """llama-bench over RPC: tokens a second of the prompt and of generation behind each depth."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KVQ_", "GGML_BACKEND"))}
    env["LD_LIBRARY_PATH"] = str(a.lib)
    # a prompt, then generation behind each depth: llama-bench multiplies lists, so these are two commands
    command = [str(a.lib / "llama-bench"), "-m", str(a.model), "--rpc", f"127.0.0.1:{port}", "-dev", a.remote]
    command += ["-ngl", "99", "-fa", "1", "-t", str(a.threads), "-r", str(a.repeat), "-o", "jsonl"]
    if a.declare:
        command += ["-ctk", a.declare, "-ctv", a.declare]
    depths = ",".join(map(str, a.depths))
    row: Row = {}
    for more in (["-p", str(a.prompt), "-n", "0"], ["-p", "0", "-n", str(a.gen), "-d", depths]):
        done = subprocess.run([*command, *more], env=env, capture_output=True, text=True)
        if done.returncode:
            text = f"{shlex.join([*command, *more])}: status {done.returncode}\n"
            sys.exit(text + done.stdout[-1000:] + done.stderr[-2000:])
        for line in done.stdout.splitlines():
            found = json.loads(line)
            name = f"tg at {found['n_depth']}" if found["n_gen"] else f"pp {found['n_prompt']}"
            row[name] = found["avg_ts"]
    return row


def options() -> argparse.Namespace:
    def paths(text: str) -> list[str]:
        return text.split(",")

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--lib", type=Path, required=True, help="folder of ggml-rpc-server, llama-bench and libggml-kvq.so")
    p.add_argument("-m", "--model", type=Path, required=True)
    p.add_argument("--devices", type=paths, default=["CPU", "KVQ0"], help="upstream's and ours on the server")
    p.add_argument("--remote", default="RPC0", help="the server's device as the client names it")
    p.add_argument("--arms", type=paths, default=["kivi", "auto:bits=2.25"], help="METHOD or METHOD:key=value:...")
    p.add_argument("--depths", type=lambda s: [int(x) for x in s.split(",")], default=[8192])
    p.add_argument("--prompt", type=int, default=8192)
    p.add_argument("--gen", type=int, default=64)
    p.add_argument("--repeat", type=int, default=2, help="-r of llama-bench")
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--declare", help="type of the cache that llama.cpp declares")
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("--log", type=Path, default=Path("rpc-server.log"), help="what the last server printed")
    a = p.parse_args()
    a.lib = a.lib.resolve()
    return a


def main() -> None:
    a = options()
    print(shlex.join([Path(sys.executable).name, *sys.argv]), flush=True)
    arms, gpu = [UPSTREAM, *a.arms], "CPU" not in a.devices
    rows: dict[str, list[Row]] = {arm: [] for arm in arms}
    lines: dict[str, str] = {}
    for _ in range(a.rounds):
        for arm in arms:
            port = free_port()
            with server(arm, a, port, a.log) as pid:
                before = used_mib(pid, gpu)
                with peak(pid, gpu) as most:
                    row = client(a, port)
                row["MiB"] = most[0] - before
            rows[arm].append(row)
            said = [x for x in a.log.read_text(errors="replace").splitlines() if " KV cache instead of " in x]
            lines[arm] = said[-1] if said else ""
    base = rows[UPSTREAM]
    for arm in arms:
        text = [f"{arm:28}"]
        for key in base[0]:
            value = statistics.median(r[key] for r in rows[arm])
            ratio = value / statistics.median(r[key] for r in base)
            text.append(f"{key} {value:.1f} ({ratio:.2f}x)")
        print("  ".join(text), flush=True)
        if lines[arm]:
            print("    " + lines[arm])


if __name__ == "__main__":
    main()
