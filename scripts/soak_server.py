#!/usr/bin/env python3
"""llama-server under load: requests of random lengths in every slot, streams that are cut off, slots saved, erased and
restored, contexts that shift. Fixed probes must be answered alike before and after, every request must succeed, and
memory must stay as it is.

    soak_server.py --minutes 20 --method kivi [--slots 8] [--model MODEL.gguf] [--port 8790]
    soak_server.py --minutes 20 --method kivi --declare q4_0 --slots 2 --clients 6 --cache-ram 32

Several clients of a slot take it from each other, so that llama-server puts their prompts into its RAM cache.
Prints one line of JSON with counts and the server's resident memory minute by minute, in MiB; exit code 1 when
something was not as it should be. --method upstream runs the same load over llama.cpp's own cache, to compare with.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from ggml_kvq import _paths

ROOT = Path(__file__).resolve().parent.parent
WORDS = [
    "the",
    "register",
    "holds",
    "a",
    "word",
    "that",
    "is",
    "read",
    "by",
    "decoder",
    "before",
    "next",
    "cycle",
    "of",
    "model",
    "cache",
    "page",
]


class Soak:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.url = f"http://127.0.0.1:{args.port}"
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.saved: dict[int, list[str]] = {i: [] for i in range(args.slots)}
        self.memory: list[float] = []
        ours = args.method != "upstream"
        env = dict(os.environ)
        if ours:
            env.update(KVQ_METHOD=args.method, KVQ_OPTS=args.opts, GGML_BACKEND_PATH=str(_paths.backend()))
        flags = [
            "-m",
            str(args.model),
            "-dev",
            "KVQ0" if ours else "none",
            "-fa",
            "on",
            "-c",
            str(640 * args.slots),
            "-np",
            str(args.slots),
            "-t",
            str(args.threads),
            "-b",
            "512",
        ]
        more = [
            "--port",
            str(args.port),
            "--slot-save-path",
            f"{folder}/",
            "--context-shift",
            "--cache-ram",
            str(args.cache_ram),
            "--no-webui",
            *(("-ctk", args.declare, "-ctv", args.declare) if args.declare else ()),
        ]
        self.log = open(folder / "server.log", "w")
        self.server = subprocess.Popen(
            [str(_paths.program("llama-server")), *flags, *more], env=env, stdout=self.log, stderr=subprocess.STDOUT
        )

    def wait(self) -> None:
        for _ in range(600):
            if self.server.poll() is not None:
                raise SystemExit(
                    f"the server ended with {self.server.returncode}:"
                    f" {(self.folder / 'server.log').read_text()[-2000:]}"
                )
            try:
                urllib.request.urlopen(self.url + "/health", timeout=5).close()
                return
            except OSError:
                time.sleep(0.1)
        raise SystemExit("the server does not answer")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=600)

    def ask(self, **body: Any) -> dict[str, Any]:
        with self.post("/completion", {"temperature": 0, "cache_prompt": True, **body}) as r:
            return dict(json.loads(r.read()))

    def probes(self) -> list[str]:
        prompts = [
            " ".join(WORDS[(i * k) % len(WORDS)] for i in range(n)) for k, n in ((1, 12), (3, 60), (5, 130), (7, 230))
        ]
        return [
            self.ask(prompt=p, n_predict=24, id_slot=i % self.args.slots, cache_prompt=False)["content"]
            for i, p in enumerate(prompts)
        ]

    def rss(self) -> int:
        status = Path(f"/proc/{self.server.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))

    def one(self, slot: int, rng: random.Random) -> None:
        what, n = rng.random(), int(2 ** rng.uniform(0, 8.6))
        prompt = " ".join(rng.choice(WORDS) for _ in range(n))
        if what < 0.55:
            self.ask(prompt=prompt, n_predict=rng.randint(1, 40), id_slot=slot)
            self.counts["answers"] += 1
        elif what < 0.62:  # until the context has shifted
            r = self.ask(prompt=prompt, n_predict=700, id_slot=slot, ignore_eos=True)
            self.counts["shifts"] += bool(r.get("tokens_predicted", 0) + r.get("tokens_evaluated", 0) > 640)
        elif what < 0.8:  # a reader that goes away
            with self.post(
                "/completion", {"prompt": prompt, "n_predict": 300, "stream": True, "id_slot": slot, "ignore_eos": True}
            ) as r:
                for _ in range(rng.randint(1, 12)):
                    r.readline()
            self.counts["cut off"] += 1
        elif what < 0.88:
            name = f"slot{slot}-{rng.randint(0, 2)}"
            with self.post(f"/slots/{slot}?action=save", {"filename": name}) as r:
                if json.loads(r.read())["n_saved"] and name not in self.saved[slot]:
                    self.saved[slot].append(name)
            self.counts["saved"] += 1
        elif what < 0.95 and self.saved[slot]:
            other = rng.randrange(self.args.slots)
            name = rng.choice(self.saved[other] or self.saved[slot])
            with self.post(f"/slots/{slot}?action=restore", {"filename": name}) as r:
                assert json.loads(r.read())["n_restored"] >= 0
            self.ask(prompt=prompt, n_predict=4, id_slot=slot)
            self.counts["restored"] += 1
        else:
            with self.post(f"/slots/{slot}?action=erase", {}) as r:
                r.read()
            self.counts["erased"] += 1

    def worker(self, client: int, end: float) -> None:
        rng, slot = random.Random(self.args.seed * 1000 + client), client % self.args.slots
        while time.monotonic() < end and len(self.problems) < 5:
            try:
                self.one(slot, rng)
            except Exception as e:  # whatever it is, it is to be told
                body = e.read().decode()[:200] if isinstance(e, urllib.request.HTTPError) else ""
                self.problems.append(f"slot {slot}: {type(e).__name__}: {e} {body}")

    def wake(self) -> None:
        """llama-server puts a save off while its slot is busy. Each answer that ends lets one of them go on."""
        for i in range(4 * self.args.slots):
            self.ask(prompt="a", n_predict=1, id_slot=i % self.args.slots)

    def load(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        n = self.args.clients or self.args.slots
        threads = [threading.Thread(target=self.worker, args=(i, end)) for i in range(n)]
        for t in threads:
            t.start()
        for t in threads:
            while t.is_alive():
                t.join(60)
                self.memory.append(round(self.rss() / 1024, 1))
                print(f"{self.memory[-1]} MiB, {sum(self.counts.values())} requests", file=sys.stderr, flush=True)
                if time.monotonic() > end:
                    self.wake()
        time.sleep(1)

    def run(self) -> dict[str, Any]:
        self.wait()
        seconds = 60 * self.args.minutes
        before = self.probes()
        self.load(0.6 * seconds)  # llama-server's RAM cache and heap have their size by then
        self.probes()
        rss = self.rss()
        self.load(0.4 * seconds)
        after = self.probes()
        grown = self.rss() / rss - 1
        if after != before:
            self.problems.append(f"probes were answered {before}, now {after}")
        if abs(grown) > 0.02:
            self.problems.append(f"memory went from {rss} KiB to {self.rss()} KiB")
        self.server.terminate()
        code = self.server.wait(60)
        self.log.close()
        text = (self.folder / "server.log").read_text()
        self.problems += [line for line in text.splitlines() if "ggml-kvq: error" in line][:5]
        if code:
            self.problems.append(f"the server ended with {code}")
        return {
            "method": self.args.method,
            "minutes": self.args.minutes,
            **self.counts,
            "rss_mib": self.memory,
            "grown": round(grown, 4),
            "problems": self.problems,
        }


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--minutes", type=float, default=20)
    p.add_argument("--method", default="kivi")
    p.add_argument("--opts", default="")
    p.add_argument("--slots", type=int, default=8)
    p.add_argument("--clients", type=int, default=0, help="at once; 0: as many as slots")
    p.add_argument("--cache-ram", type=int, default=0, help="MiB of the server's RAM cache")
    p.add_argument("--declare", default="", help="type of the cache (-ctk, -ctv)")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--port", type=int, default=8790)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--model", type=Path, default=ROOT / "models" / "kvq-demo-q8_0.gguf")
    args = p.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvq-soak-") as folder:
        soak = Soak(args, Path(folder))
        try:
            result = soak.run()
        finally:
            soak.server.kill()
            soak.server.wait()
    print(json.dumps(result))
    return bool(result["problems"])


if __name__ == "__main__":
    sys.exit(main())
