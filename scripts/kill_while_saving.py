#!/usr/bin/env python3
"""kill -9 of llama-server while it writes a slot's state, at random moments. Each file that is there must be whole (a
restored slot goes on with the text that the saved one would have written) or refused, and the server that refuses one
must answer as before.

    kill_while_saving.py [--kills 20] [--method kivi] [--opts state=rows] [--model MODEL.gguf] [--seed 1]

Prints one line of JSON: how many files were absent, cut off and refused, whole. Exit code 1 when something was not as
it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from ggml_kvq import _paths

ROOT = Path(__file__).resolve().parent.parent
TEXT = ROOT / "tests" / "data" / "walk.txt"


class Server:
    """llama-server with one slot, whose states lie in `folder`."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        env = {**os.environ, "KVQ_METHOD": args.method, "KVQ_OPTS": args.opts}
        env["GGML_BACKEND_PATH"] = str(_paths.backend())
        flags = ["-m", args.model, "-dev", "KVQ0", "-fa", "on", "-c", 4096, "-np", 1, "-t", 2, "--port", port]
        more = ["--slot-save-path", f"{folder}/", "--cache-ram", 0, "--no-webui"]
        with open(folder.parent / "server.log", "a") as log:
            argv = [str(x) for x in (_paths.program("llama-server"), *flags, *more)]
            self.process = subprocess.Popen(argv, env=env, stdout=log, stderr=subprocess.STDOUT)
        for _ in range(600):
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended with {self.process.returncode}: {folder.parent / 'server.log'}")
            try:
                urllib.request.urlopen(self.url + "/health", timeout=5).close()
                return
            except OSError:
                time.sleep(0.05)
        raise SystemExit("the server does not answer")

    def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as r:
                return r.status, json.loads(r.read())
        except urllib.error.HTTPError as e:
            return e.code, json.loads(e.read())

    def goes_on(self, prompt: str) -> str:
        """What the slot writes behind the prompt that it holds."""
        status, answer = self.post("/completion", prompt=prompt, n_predict=16, temperature=0, cache_prompt=True)
        assert status == 200, answer
        return str(answer["content"])

    def end(self, kill: bool = False) -> None:
        self.process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        self.process.wait(60)


def saved(server: Server, name: str) -> None:
    with suppress(OSError, ValueError):  # it is killed: that is what this is about
        server.post("/slots/0?action=save", filename=name)


def run(args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(args.seed)
    counts = {"absent": 0, "refused": 0, "whole": 0}
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp) / "slots"
        folder.mkdir()
        prompt = TEXT.read_text()[: args.characters]
        server = Server(args, folder)
        server.goes_on(prompt)
        status, good = server.post("/slots/0?action=save", filename="good")
        assert status == 200, good
        server.post("/slots/0?action=restore", filename="good")
        text = server.goes_on(prompt)
        server.end()
        takes = 0.0
        for i in range(args.kills):
            server = Server(args, folder)
            assert server.post("/slots/0?action=restore", filename="good")[1]["n_restored"] == good["n_saved"]
            if not takes:
                before = time.monotonic()
                saved(server, "measure")
                takes = time.monotonic() - before
            thread = threading.Thread(target=saved, args=(server, f"state{i}"))
            thread.start()
            time.sleep(rng.uniform(0, 1.1 * takes))
            server.end(kill=True)
            thread.join()
        size = (folder / "good").stat().st_size
        server = Server(args, folder)
        for i in range(args.kills):
            there = folder / f"state{i}"
            if not there.exists():
                counts["absent"] += 1
                continue
            n = there.stat().st_size
            status, answer = server.post("/slots/0?action=restore", filename=there.name)
            if status != 200:
                counts["refused"] += 1
                if n == size and there.read_bytes() == (folder / "good").read_bytes():
                    problems.append(f"{there.name} is whole and was refused: {answer}")
                server.post("/slots/0?action=restore", filename="good")
            else:
                counts["whole"] += 1
                if n != size or answer["n_restored"] != good["n_saved"]:
                    problems.append(f"{there.name} of {n} bytes of {size} was taken: {answer}")
            if (now := server.goes_on(prompt)) != text:
                problems.append(f"behind {there.name} ({n} of {size} bytes) the slot wrote {now!r}, not {text!r}")
        server.end()
    return {"kills": args.kills, "bytes": size, "save_ms": round(1e3 * takes, 1), **counts, "problems": problems}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--method", default="kivi")
    parser.add_argument("--opts", default="")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "kvq-demo-q8_0.gguf")
    parser.add_argument("--characters", type=int, default=6000, help="length of the prompt that a state holds")
    parser.add_argument("--seed", type=int, default=1)
    result = run(parser.parse_args(argv))
    print(json.dumps(result))
    return int(bool(result["problems"]))


if __name__ == "__main__":
    sys.exit(main())
