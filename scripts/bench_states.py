#!/usr/bin/env python3
"""Seconds that a saved state takes, out and in: llama.cpp's f16 cache and ours, in turns in one process.

    bench_states.py -m MODEL.gguf [--depth 7000] [-t 2] [--rounds 5] [--arms "upstream,kivi,kivi:state=compact"]
    bench_states.py -m MODEL.gguf --switch        llama-server: a request after the other conversation had the slot
    bench_states.py -m MODEL.gguf --request 8000  llama-server: a new prompt, with the checkpoints that it makes
    bench_states.py -m MODEL.gguf --held 64       llama-server: prompts of 2000 tokens that a RAM cache of 64 MiB holds

declare=TYPE is the type that llama.cpp declares (-ctk, -ctv), auto: the smallest that holds the method. Arms of f16
hold the same rows: one context of upstream's computes them, the others restore them. Arms that are declared smaller
read as many tokens themselves. get is
llama_state_seq_get_data into memory that was used before, set is llama_state_seq_set_data of the same bytes into the
same cells. Behind the first set the state is taken out again and compared. Figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from ctypes import POINTER, c_int8, c_int32, c_void_p, pointer
from pathlib import Path
from typing import Any

import ggml_kvq
import numpy as np
import numpy.typing as npt
from ggml_kvq import Model, _paths, declared, gguf_header, processes
from ggml_kvq.core import llama

ARMS = (
    "upstream,f16,kivi,higgs,auto:bits=2.5,aqua:predictor=none,zipcache,minikv,specache,"
    "kivi:state=compact,higgs:state=compact,"
    "kivi:declare=auto,higgs:declare=auto,auto:bits=2.5:declare=auto,aqua:predictor=none:declare=auto,"
    "zipcache:declare=auto"
)
HELD = 2000  # tokens of a prompt of --held
CHUNK, SEQUENCES = 256, 255  # tokens of a sequence while the rows are computed: attention over them is short
Bytes = npt.NDArray[np.uint8]


def parts(arm: str) -> tuple[str, str | None]:
    method, _, opts = arm.partition(":")
    return method, opts or None


def types(arm: str, model: Path) -> tuple[str, str | None, str, str]:
    """(method, options, type of keys, type of values)"""
    method, opts = parts(arm)
    kind, rest = declared.take((opts or "").split(","))
    k = v = kind or "f16"
    if kind == declared.AUTO:
        k, v = declared.smallest(gguf_header.read(model, tensors=True), method, ",".join(rest), None)
    return method, ",".join(rest) or None, k, v


def address(data: Bytes) -> Any:
    return data.ctypes.data_as(POINTER(ctypes.c_uint8))


class Arm:
    """A context of one cache."""

    def __init__(self, name: str, a: argparse.Namespace, n_ctx: int) -> None:
        self.name, (method, opts, k, v) = name, types(name, a.model)
        device = a.device if method == "upstream" else None
        self.model = Model(a.model, method, opts, n_ctx=n_ctx, n_threads=a.threads, device=device, type_k=k, type_v=v)
        self.lib, self.ctx = self.model._libs.llama, self.model._ctx
        self.seconds: dict[str, list[float]] = {"get": [], "set": []}
        self.same = True
        self.is_f16 = (k, v) == declared.F16

    def fill(self, rows: Bytes, a: argparse.Namespace) -> None:
        if self.is_f16:
            self.set(rows, len(rows))
            return
        for _ in self.model.feed(
            np.random.default_rng(0).integers(0, self.model.n_vocab, a.depth), outputs=np.zeros(a.depth, bool)
        ):
            pass

    def size(self) -> int:
        return int(self.lib.llama_state_seq_get_size(self.ctx, 0))

    def get(self, data: Bytes) -> float:
        n, t = self.size(), time.perf_counter()
        if processes.compute(lambda: self.lib.llama_state_seq_get_data(self.ctx, address(data), n, 0)) != n:
            sys.exit(f"{self.name}: the state could not be taken out")
        return time.perf_counter() - t

    def set(self, data: Bytes, n: int) -> float:
        t = time.perf_counter()
        if processes.compute(lambda: self.lib.llama_state_seq_set_data(self.ctx, address(data), n, 0)) != n:
            sys.exit(f"{self.name}: the state could not be restored")
        return time.perf_counter() - t

    def turn(self, data: Bytes, other: Bytes, first: bool) -> None:
        self.seconds["get"].append(self.get(data))
        self.seconds["set"].append(self.set(data, self.size()))
        if first:
            self.get(other)
            self.same = bool((other[: self.size()] == data[: self.size()]).all())


def rows_of(a: argparse.Namespace, n_ctx: int) -> Bytes:
    """The state of `depth` random tokens, computed by upstream's cache."""
    chunk = max(CHUNK, -(-a.depth // SEQUENCES))
    with Model(a.model, "upstream", n_ctx=256, n_threads=a.threads, device=a.device) as m:
        lib = m._libs.llama
        cp = lib.llama_memory_seq_cp
        cp.restype, cp.argtypes = None, [c_void_p, c_int32, c_int32, c_int32, c_int32]
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = n_ctx, -(-a.depth // chunk) + 1
        params.n_batch = params.n_ubatch = chunk
        params.n_threads = params.n_threads_batch = a.threads
        params.flash_attn_type, params.kv_unified = 1, True
        ctx = lib.llama_init_from_model(m._model, params)
        rng = np.random.default_rng(0)
        for at in range(0, a.depth, chunk):
            n, seq = min(chunk, a.depth - at), at // chunk + 1
            ids = pointer(c_int32(seq))
            batch = llama.llama_batch(
                n_tokens=n,
                token=(c_int32 * n)(*rng.integers(0, m.n_vocab, n).tolist()),
                pos=(c_int32 * n)(*range(at, at + n)),
                n_seq_id=(c_int32 * n)(*[1] * n),
                seq_id=ctypes.cast((POINTER(c_int32) * n)(*[ids] * n), POINTER(POINTER(c_int32))),
                logits=(c_int8 * n)(*[0] * (n - 1), 1),
            )
            if lib.llama_decode(ctx, batch):
                sys.exit(f"llama_decode of {n} tokens at {at} failed")
            cp(lib.llama_get_memory(ctx), seq, 0, -1, -1)
        size = lib.llama_state_seq_get_size(ctx, 0)
        data = np.zeros(size, np.uint8)
        lib.llama_state_seq_get_data(ctx, address(data), size, 0)
        lib.llama_free(ctx)
        return data


def measure(a: argparse.Namespace) -> list[dict[str, Any]]:
    n_ctx = -(-(a.depth + 64) // 256) * 256
    rows = rows_of(a, n_ctx)
    arms = [Arm(name, a, n_ctx) for name in a.arms]
    for x in arms:
        x.fill(rows, a)
        for _ in x.model.feed([1] * 8) if x.is_f16 else ():  # the cache learns how many threads there are
            pass
    size = max(x.size() for x in arms)
    data, other = np.ones(size, np.uint8), np.ones(size, np.uint8)
    for i in range(a.rounds):
        for x in arms:
            x.turn(data, other, i == 0)
    out = []
    for x in arms:
        stats = x.model.kv_stats() if x.model.kv_method else {}
        get, put = (statistics.median(x.seconds[k]) for k in ("get", "set"))
        out.append({"arm": x.name, "get": get, "set": put, "mib": x.size() / 2**20, "same": x.same, **few(stats)})
        x.model.close()
    return out


def few(stats: dict[str, Any]) -> dict[str, Any]:
    return {k: stats[k] for k in ("n_placed", "n_sealed") if k in stats}


# -------------------------------------------------------------- a server's requests


class Server:
    """A llama-server of one slot, whose states take their usual ways: its RAM cache and its checkpoints."""

    def __init__(self, arm: str, a: argparse.Namespace, port: int, more: Sequence[str] = ()) -> None:
        method, opts, k, v = types(arm, a.model)
        env, flags = dict(os.environ), ["-ctk", k, "-ctv", v]
        if method != "upstream":
            env |= {"KVQ_METHOD": method, "KVQ_OPTS": opts or "", "GGML_BACKEND_PATH": str(_paths.backend())}
            flags += ["-dev", "KVQ0"]
        n_ctx = max(8192, a.request + 256)
        command = [str(_paths.program("llama-server")), "-m", str(a.model), "-c", str(n_ctx), "-np", "1", "-fa", "on"]
        command += ["-t", str(a.threads), "--port", str(port), "--no-webui", *flags]
        self.url = f"http://127.0.0.1:{port}"
        self.seconds: list[float] = []
        self.process = subprocess.Popen(
            [*command, *more], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(600):
            try:
                urllib.request.urlopen(self.url + "/health", timeout=1)
                return
            except OSError:
                time.sleep(0.1)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        return json.loads(urllib.request.urlopen(request, timeout=600).read())

    def ask(self, prompt: list[int], n_predict: int = 1) -> dict[str, Any]:
        body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "cache_prompt": True}
        t = time.perf_counter()
        answer = self.post("/completion", body)
        self.seconds.append(time.perf_counter() - t)
        return dict(answer)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def requests(a: argparse.Namespace) -> list[dict[str, Any]]:
    """Median seconds of a request to each arm's server, in turns. --switch: the other conversation was there last.
    --request: a prompt that the server has not seen.
    """
    rng, servers = np.random.default_rng(0), []
    known = [rng.integers(300, 20000, n).tolist() for n in (2309, 2789)]
    n_first = 2 if a.switch else 1
    try:
        for i, arm in enumerate(a.arms):
            servers.append(Server(arm, a, a.port + i))
        for i in range((2 if a.switch else 1) * a.rounds + n_first):
            prompt = known[i % 2] if a.switch else rng.integers(300, 20000, a.request).tolist()
            for server in servers:
                server.ask(prompt)
        key = "switch" if a.switch else "request"
        return [
            {"arm": arm, key: statistics.median(x.seconds[n_first:])} for arm, x in zip(a.arms, servers, strict=True)
        ]
    finally:
        for server in servers:
            server.stop()


def held(arm: str, a: argparse.Namespace) -> dict[str, Any]:
    """Twelve prompts of 2000 tokens go to a server with one slot, twice each: the second time only the last token is
    computed, as when a prompt comes back. Then they come back, the newest first, until one is computed anew: how many
    the RAM cache held, and how many of them go on in the text that they had the second time.
    """
    text = (Path(ggml_kvq.__file__).parent / "data" / "predictors.txt").read_text()
    with tempfile.TemporaryDirectory(prefix="kvq-held-") as folder:
        server = Server(arm, a, a.port, ["--cache-ram", str(a.held), "--slot-save-path", f"{folder}/"])
        try:
            tokens = server.post("/tokenize", {"content": text})["tokens"]
            prompts = [tokens[i * HELD // 4 : i * HELD // 4 + HELD] for i in range(12)]
            texts = [[server.ask(prompt, 24)["content"] for _ in range(2)][1] for prompt in prompts]
            server.post("/slots/0?action=save", {"filename": "slot"})
            n_held = n_same = 0
            for i in range(len(prompts) - 2, -1, -1):
                answer = server.ask(prompts[i], 24)
                if answer["timings"]["cache_n"] < HELD // 2:
                    break
                n_held += 1
                n_same += answer["content"] == texts[i]
            size = (Path(folder) / "slot").stat().st_size
            return {"arm": arm, "held": n_held, "same": n_same, "slot_mib": round(size / 2**20, 2)}
        finally:
            server.stop()


def options() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-m", "--model", type=Path, required=True)
    p.add_argument("--depth", type=int, default=7000, help="tokens of the sequence")
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument(
        "--arms", type=lambda s: s.split(","), default=ARMS.split(","), help="METHOD or METHOD:key=value:..."
    )
    p.add_argument("--device", help="of upstream's cache (default: as Model)")
    p.add_argument("--switch", action="store_true", help="llama-server's change of conversations instead")
    p.add_argument("--request", type=int, default=0, help="a request of so many tokens to llama-server instead")
    p.add_argument("--held", type=int, default=0, help="MiB of llama-server's RAM cache: what it holds instead")
    p.add_argument("--port", type=int, default=8791, help="of the first arm's server; the others' come behind it")
    p.add_argument("--json", type=Path, help="append the rows here")
    a = p.parse_args()
    a.arms = [x.replace(":", ",").replace(",", ":", 1) for x in a.arms]
    return a


def main() -> None:
    a = options()
    command = shlex.join([Path(sys.executable).name, *sys.argv])
    print(command)
    for arm in a.arms if a.held else ():
        row = held(arm, a)
        print(
            f"{arm:28} {row['held']:3} held, {row['same']} of them go on as before,"
            f" {row['slot_mib']:6} MiB a slot file",
            flush=True,
        )
    if a.held:
        return
    rows = requests(a) if a.switch or a.request else measure(a)
    kinds = ("get", "set", "switch", "request")
    base = sum(rows[0][k] for k in kinds if k in rows[0])
    for row in rows:
        seconds = [(k, row[k]) for k in kinds if k in row]
        text = "  ".join(f"{k} {s:.4f}" for k, s in seconds)
        more = "" if row.get("same", True) else "  NOT the same bytes again"
        print(f"{row['arm']:24} {text}  {sum(s for _, s in seconds) / base:6.2f}x of {rows[0]['arm']}{more}")
        if a.json:
            with open(a.json, "a") as f:
                f.write(json.dumps({**row, "command": command}) + "\n")


if __name__ == "__main__":
    main()
