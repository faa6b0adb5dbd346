"""What llama.cpp does to a cache besides decoding: random sequences of decode, rollback, copy, shift, save, restore
and clear on our cache and on upstream's, the same tokens at the same positions, logits compared after every step.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from ctypes import POINTER, c_int8, c_int32, c_size_t, c_uint8, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ggml_kvq import Model, _paths
from ggml_kvq.core import llama

N_CTX = 1024
TEXT = (
    Path(__file__).parent / "data" / "walk.txt"
).read_text()  # C declarations, which the demo model reads well; fixed, as limits depend on it
MORE = [
    ("llama_memory_seq_cp", None, [c_void_p, c_int32, c_int32, c_int32, c_int32]),
    ("llama_memory_seq_add", None, [c_void_p, c_int32, c_int32, c_int32, c_int32]),
    ("llama_state_seq_get_size", c_size_t, [c_void_p, c_int32]),
    (
        "llama_state_seq_get_data",
        c_size_t,
        [c_void_p, POINTER(c_uint8), c_size_t, c_int32],
    ),
    (
        "llama_state_seq_set_data",
        c_size_t,
        [c_void_p, POINTER(c_uint8), c_size_t, c_int32],
    ),
]


class Context:
    """A llama_context with n_seq sequences on the weights of a Model (which also keeps a small context of its own).
    declared: the cache type that llama.cpp is told.
    """

    def __init__(
        self, path: Path, method: str | None, opts: str, n_seq: int, unified: bool, declared: str = "f16"
    ) -> None:
        self.model = Model(path, kv_method=method or "upstream", kv_opts=opts or None, n_ctx=256, n_threads=2)
        self.lib = self.model._libs.llama
        for name, restype, argtypes in MORE:
            f = getattr(self.lib, name)
            f.restype, f.argtypes = restype, argtypes
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = (
            N_CTX * n_seq,
            512,
            128,
            n_seq,
        )
        params.n_threads = params.n_threads_batch = 2
        params.flash_attn_type, params.kv_unified = llama.FLASH_ATTN_ENABLED, unified
        params.type_k = params.type_v = llama.GGML_TYPES[declared]
        kvq = self.model._libs.need_kvq()
        if method:
            assert kvq.kvq_configure(method.encode(), opts.encode(), None, os.fsencode(path)) == 0
        self.ctx = self.lib.llama_init_from_model(self.model._model, params)
        if method:
            kvq.kvq_configure(None, None, None, None)
        assert self.ctx
        self.memory = self.lib.llama_get_memory(self.ctx)

    def close(self) -> None:
        self.lib.llama_free(self.ctx)
        self.model.close()

    def decode(self, seq: int, tokens: list[int], pos: int) -> np.ndarray[Any, Any]:
        """Log-probabilities of the last token."""
        n = len(tokens)
        seq_id = (c_int32 * 1)(seq)
        rows = (POINTER(c_int32) * n)(*[ctypes.cast(seq_id, POINTER(c_int32))] * n)
        batch = llama.llama_batch(
            n_tokens=n,
            token=(c_int32 * n)(*tokens),
            pos=(c_int32 * n)(*range(pos, pos + n)),
            n_seq_id=(c_int32 * n)(*[1] * n),
            seq_id=ctypes.cast(rows, POINTER(POINTER(c_int32))),
            logits=(c_int8 * n)(*[0] * (n - 1), 1),
        )
        assert self.lib.llama_decode(self.ctx, batch) == 0
        x = np.ctypeslib.as_array(self.lib.llama_get_logits(self.ctx), (1, self.model.n_vocab))[0].astype(np.float64)
        x -= x.max()
        return x - np.log(np.exp(x).sum())

    def decode_both(self, parts: list[list[int]], pos: int) -> list[np.ndarray[Any, Any]]:
        """Sequences 0 and 1 in one batch, the same number of tokens each."""
        n = len(parts[0])
        ids = [(c_int32 * 1)(s) for s in (0, 1)]
        rows = (POINTER(c_int32) * (2 * n))(*[ctypes.cast(ids[i // n], POINTER(c_int32)) for i in range(2 * n)])
        batch = llama.llama_batch(
            n_tokens=2 * n,
            token=(c_int32 * (2 * n))(*parts[0], *parts[1]),
            pos=(c_int32 * (2 * n))(*range(pos, pos + n), *range(pos, pos + n)),
            n_seq_id=(c_int32 * (2 * n))(*[1] * (2 * n)),
            seq_id=ctypes.cast(rows, POINTER(POINTER(c_int32))),
            logits=(c_int8 * (2 * n))(*[int(i % n == n - 1) for i in range(2 * n)]),
        )
        assert self.lib.llama_decode(self.ctx, batch) == 0
        x = np.ctypeslib.as_array(self.lib.llama_get_logits(self.ctx), (2, self.model.n_vocab)).astype(np.float64)
        x -= x.max(1, keepdims=True)
        return list(x - np.log(np.exp(x).sum(1, keepdims=True)))

    def save(self, seq: int) -> bytes:
        n = self.lib.llama_state_seq_get_size(self.ctx, seq)
        data = (c_uint8 * n)()
        assert self.lib.llama_state_seq_get_data(self.ctx, data, n, seq) == n
        return bytes(data)

    def load(self, seq: int, data: bytes) -> None:
        assert self.lib.llama_state_seq_set_data(
            self.ctx, (c_uint8 * len(data)).from_buffer_copy(data), len(data), seq
        ) == len(data)


@dataclass(frozen=True)
class Step:
    """One operation of a random walk: decode, cut, shift, copy, save, load or clear, of sequence `seq`.

    at: where in the text; n: tokens decoded, or kept by a cut; pos: position of the first one, or -1 to empty `seq`
    before it.
    """

    op: str
    seq: int = 0
    at: int = 0
    n: int = 0
    pos: int = 0


def walk_steps(n_steps: int, seed: int, n_text: int) -> Iterator[Step]:
    """A random walk over two sequences of a text of n_text tokens. It depends on the seed alone, not on any cache."""
    rng = np.random.default_rng(seed)
    length = [0, 0]
    held: dict[int, int] = {}
    for _ in range(n_steps):
        seq, op = int(rng.integers(2)), int(rng.integers(20))
        if op < 12:
            n = int(rng.integers(1, 6) if rng.integers(3) else rng.integers(30, 250))
            if length[seq] + n > N_CTX - 8:
                yield Step("cut", seq, n=0)
                length[seq] = 0
            yield Step("decode", seq, int(rng.integers(0, n_text - n)), n, length[seq])
            length[seq] += n
        elif op < 15 and length[seq]:
            length[seq] -= int(rng.integers(1, min(length[seq], 40) + 1))
            yield Step("cut", seq, n=length[seq])
        elif op == 15 and length[seq] > 200:
            yield Step("shift", seq)
            length[seq] -= 64
        elif op == 16 and length[seq]:
            yield Step("copy", seq)
            length[1 - seq] = length[seq]
        elif op == 17 and length[seq]:
            yield Step("save", seq)
            held[seq] = length[seq]
        elif op == 18 and seq in held:
            yield Step("load", seq)
            length[seq] = held[seq]
        elif op == 19 and not rng.integers(4):
            yield Step("clear")
            length = [0, 0]


def walk(c: Context, steps: Sequence[Step], text: list[int]) -> list[np.ndarray[Any, Any]]:
    """Log-probabilities after each decode of the walk."""
    out: list[np.ndarray[Any, Any]] = []
    held: dict[int, bytes] = {}
    for s in steps:
        if s.op == "decode":
            out.append(c.decode(s.seq, text[s.at : s.at + s.n], s.pos))
            assert np.isfinite(out[-1]).all(), s
        elif s.op == "cut":
            assert c.lib.llama_memory_seq_rm(c.memory, s.seq, s.n or -1, -1)
        elif s.op == "shift":  # context shift: drop 64 tokens behind the first 4
            assert c.lib.llama_memory_seq_rm(c.memory, s.seq, 4, 68)
            c.lib.llama_memory_seq_add(c.memory, s.seq, 68, -1, -64)
        elif s.op == "copy":
            c.lib.llama_memory_seq_rm(c.memory, 1 - s.seq, -1, -1)
            c.lib.llama_memory_seq_cp(c.memory, s.seq, 1 - s.seq, -1, -1)
        elif s.op == "save":
            held[s.seq] = c.save(s.seq)
        elif s.op == "load":
            c.load(s.seq, held[s.seq])
        else:
            c.lib.llama_memory_clear(c.memory, True)
    c.close()
    return out


@lru_cache(maxsize=4)
def upstream_walk(
    path: Path, unified: bool, steps: tuple[Step, ...], text: tuple[int, ...]
) -> list[np.ndarray[Any, Any]]:
    """What upstream's f16 cache answers: the same for every method that walks these steps."""
    return walk(Context(path, None, "", 2, unified), steps, list(text))


def random_walk(
    path: Path,
    method: str,
    opts: str,
    unified: bool,
    n_steps: int,
    seed: int,
    tokens: list[int] | None = None,
    declared: str = "f16",
) -> list[float]:
    """KL divergence from upstream's f16 cache after each decode of a random walk. tokens: what is read, for models
    without a vocabulary.
    """
    c = Context(path, method, opts, 2, unified, declared)
    text = tokens or c.model.tokenize(TEXT, add_bos=True)
    steps = tuple(walk_steps(n_steps, seed, len(text)))
    assert {s.op for s in steps} >= {"decode", "cut", "copy", "save", "load"}
    theirs = upstream_walk(path, unified, steps, tuple(text))
    return [float((np.exp(q) * (q - p)).sum()) for p, q in zip(walk(c, steps, text), theirs, strict=True)]


# KL divergence allowed, mean and worst decode; f16 differs by rounding through 8-bit weights. A decode that reads
# wrong cells costs several nats: the worst one shows it where codes are good. xquant's presets are worse than that by
# themselves; its 2-bit codes without sharing hold its store to account.
WALKS = [
    ("f16", "", 0.004, 0.03),
    ("kivi", "bits=4", 0.03, 0.4),
    ("kivi", "bits=4,group=64,scales=u8", 0.05, 0.5),
    ("kivi", "bits=4,window=auto", 0.03, 0.4),
    ("higgs", "bits=4,window=auto", 0.03, 0.4),
    ("xquant", "window=auto", 1.5, 12),
    ("xquant", "", 1.5, 12),
    ("xquant", "kq=12,vq=12,km=12,vm=12,eta2=0", 0.4, 6),
    ("zipcache", "interval=64,salient=1", 0.06, 0.4),
    ("minikv", "bits=4,hh=0.75", 0.05, 0.4),
    ("zipcache", "interval=64,salient=0.5", 0.6, 6),
    ("specache", "top=1024,window=32", 0.004, 0.03),
    ("specache", "top=1024,far=q8,bits=1,window=32", 0.01, 0.1),
    ("specache", "top=32,window=32", 0.05, 0.4),
    # without far rows (fetch=off): 0.29 and 4.6, with streams 0.17 and 4.3
    ("specache", "near=kivi,group=128,fetch=ahead,top=1024,kept=2048,window=32", 0.12, 2.0),
    ("auto", "far=q8,top=1024,level=0,window=32", 0.01, 0.1),
    ("lab", "window=32", 0.004, 0.03),  # rows as they came, in pages that seal
]


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@pytest.mark.parametrize(("method", "opts", "limit", "worst"), WALKS, ids=[f"{m}-{o}" for m, o, *_ in WALKS])
def test_random_walk_follows_upstream(
    demo_model: Path, method: str, opts: str, limit: float, worst: float, unified: bool
) -> None:
    seed = 11
    kld = random_walk(demo_model, method, opts, unified, 120, seed)
    print(f"seed {seed}: {len(kld)} decodes, KLD mean {np.mean(kld):.5f} max {np.max(kld):.5f}")
    assert len(kld) > 40 and np.mean(kld) < limit and np.max(kld) < worst


SLOTS = [
    *((m, "", step) for m in ("f16", "kivi", "xquant", "higgs", "zipcache", "specache") for step in (512, 48)),
    *(("specache", "fetch=ahead", 48), ("kivi", "window=32,group=64", 48)),
    ("minikv", "", 512),  # in small calls its budget counts cells that nobody has overwritten yet
]


@pytest.mark.parametrize(("method", "opts", "step"), SLOTS)
def test_a_slot_that_held_a_longer_text_answers_as_a_fresh_one(
    demo_model: Path, method: str, opts: str, step: int
) -> None:
    """llama.cpp frees cells without a word. step: tokens of a call."""
    c = Context(demo_model, method, opts, 2, unified=False)
    text = c.model.tokenize(TEXT, add_bos=True)

    def answers(tokens: list[int], n: int) -> np.ndarray[Any, Any]:
        c.lib.llama_memory_seq_rm(c.memory, 0, -1, -1)
        for i in range(0, len(tokens), step):
            c.decode(0, tokens[i : i + step], i)
        return np.array([c.decode(0, [text[40 + i]], len(tokens) + i) for i in range(n)])

    fresh = answers(text[100:543], 40)
    for longer in (text[200:680], text[:900]):
        answers(longer, 3)
        assert np.abs(answers(text[100:543], 40) - fresh).max() < 1e-6
    c.close()


@pytest.mark.parametrize("method", ["f16", "kivi", "xquant", "zipcache", "minikv", "specache"])
def test_saved_sequence_reads_back_equal(demo_model: Path, method: str) -> None:
    c = Context(demo_model, method, "", 2, unified=False)
    tokens = c.model.tokenize(TEXT, add_bos=True)[:700]
    c.decode(0, tokens[:500], 0)
    c.decode(0, tokens[500:], 500)
    data = c.save(0)
    c.load(1, data)
    n_kv = (
        2 * 2 * 700 * c.model.n_layer * c.model.n_head_kv * 64
    )  # f16 rows of K and V; what comes before names cells and sequence
    # sequence 0 is followed by the empty cell list of stream 1
    assert c.save(1)[-n_kv:] == data[-n_kv - 4 : -4]
    p, q = c.decode(0, [5, 6, 7], 700), c.decode(1, [5, 6, 7], 700)
    c.close()
    assert np.abs(p - q).max() < 1e-4


# Free cells that a sequence comes back into: so many in front of another sequence's, the others behind those. Marks of
# a saved state have 3 rows at both ends of a page of 32 or 64 cells; minikv's are those of evicted cells.
HOLES = (1, 2, 5, 30, 31, 33, 62, 63, 94, 126)


@pytest.mark.parametrize(
    ("method", "opts"),
    [
        ("f16", ""),
        ("kivi", ""),
        ("kivi", "window=auto"),
        ("kivi", "bits=4,state=compact"),
        ("higgs", "bits=4"),
        ("higgs", "bits=4,state=compact"),
        ("xquant", ""),
        ("xquant", "state=compact"),
        ("auto", ""),
        ("zipcache", "salient=1"),
        ("minikv", ""),
        ("specache", ""),
        ("aqua", "predictor=none,bits=4,state=compact"),
    ],
)
def test_a_saved_sequence_comes_back_into_cells_that_lie_apart(demo_model: Path, method: str, opts: str) -> None:
    """llama-server's slots share a cache and are saved to memory when they are idle. From cells that lie apart, too."""
    c = Context(demo_model, method, opts, 3, unified=True)
    text = c.model.tokenize(TEXT, add_bos=True)

    def clear() -> None:
        c.lib.llama_memory_clear(c.memory, True)

    def load_around(hole: int, data: bytes) -> None:
        clear()
        c.decode(1, text[600 : 600 + hole], 0)
        c.decode(2, text[700:710], 0)
        assert c.lib.llama_memory_seq_rm(c.memory, 1, -1, -1)
        c.load(0, data)

    def answers(at: int) -> list[np.ndarray[Any, Any]]:
        return [c.decode(0, [text[i]], i) for i in range(at, at + 3)]

    for i in range(0, 400, 100):
        c.decode(0, text[i : i + 100], i)
    first = c.save(0)
    want = answers(400)
    for hole in HOLES:
        load_around(hole, first)
        got = answers(400)
        kld = [float((np.exp(q) * (q - p)).sum()) for p, q in zip(got, want, strict=True)]
        assert np.mean(kld) < (0.8 if method == "xquant" else 0.15), (hole, kld)
        load_around(HOLES[-1] + 1 - hole, c.save(0))
        assert np.isfinite(answers(403)).all()
    c.close()


def test_a_compact_part_that_asks_for_rows_that_never_come_is_seen(demo_model: Path) -> None:
    """Every bit of the number of rows, in the last tensor: no other one comes behind it."""
    c = Context(demo_model, "kivi", "state=compact", 2, unified=True)
    tokens = c.model.tokenize(TEXT, add_bos=True)[:300]
    for i in range(0, 300, 100):
        c.decode(0, tokens[i : i + 100], i)
    good = c.save(0)
    want = c.decode(0, [5], 300)
    last = good.rindex(b"QBLOCKS1")
    for bit in range(32):
        bad = bytearray(good)
        bad[last + 32 + bit // 8] ^= 1 << bit % 8
        c.lib.llama_memory_clear(c.memory, True)
        c.load(0, bytes(bad))
        with pytest.raises(AssertionError):
            c.decode(0, [5], 300)
    c.lib.llama_memory_clear(c.memory, True)
    c.load(0, good)
    assert np.abs(c.decode(0, [5], 300) - want).max() < 1e-5
    c.close()


# ------------------------------------------------------------------ upstream's programs, without a launcher


def program(
    name: str, *args: str | Path, method: str = "xquant", opts: str = "", **more: Any
) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "GGML_BACKEND_PATH": str(_paths.backend()),
        "KVQ_METHOD": method,
        "KVQ_OPTS": opts,
    }
    argv = [str(_paths.program(name)), *map(str, args)]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300, **more)


def test_load_line_and_buffer_size_agree(demo_model: Path) -> None:
    r = program(
        "llama-completion",
        "-m",
        demo_model,
        "-dev",
        "KVQ0",
        "-fa",
        "on",
        "-c",
        "2048",
        "-n",
        "1",
        "-p",
        "x",
        "-no-cnv",
        "-lv",
        "4",
    )
    assert r.returncode == 0, r.stderr
    line = re.search(r"ggml-kvq: xquant.*?: ([\d.]+) MiB KV cache instead of ([\d.]+) MiB", r.stderr)
    size = re.search(r"KVQ KV buffer size = +([\d.]+) MiB", r.stderr)
    assert line and size, r.stderr
    assert float(line[1]) == pytest.approx(float(size[1]), abs=0.02)
    with Model(demo_model, kv_method="xquant", n_ctx=2048) as m:
        assert m.kv_stats()["bytes_total"] / 2**20 == pytest.approx(float(line[1]), abs=0.02)


def test_llama_bench_at_depth(demo_model: Path) -> None:
    r = program(
        "llama-bench",
        "-m",
        demo_model,
        "-dev",
        "KVQ0",
        "-fa",
        "1",
        "-d",
        "300",
        "-p",
        "16",
        "-n",
        "4",
        "-r",
        "1",
        "-o",
        "json",
    )
    assert r.returncode == 0, r.stderr
    rows = json.loads(r.stdout)
    assert [(x["n_depth"], x["n_prompt"], x["n_gen"]) for x in rows] == [(300, 16, 0), (300, 0, 4)]
    assert all(x["avg_ts"] > 0 and x["devices"] == "KVQ0" for x in rows)
    sealed = re.search(r"ggml-kvq: xquant: (\d+) pages sealed", r.stderr)
    assert sealed and int(sealed[1]) > 0, r.stderr  # what was timed read codes


@pytest.mark.parametrize(
    ("args", "opts", "method", "words"),
    [
        (["-fa", "off"], "", "xquant", ["flash attention", "-fa on"]),
        (["-fa", "on", "-ctk", "bf16"], "", "xquant", ["bf16 (-ctk)", "q8_0"]),
        (["-fa", "on", "-ctk", "q4_0", "-ctv", "q4_0"], "", "f16", ["f16", "16.", "q4_0 has 4.50", "drop -ctk"]),
        (["-fa", "on", "-ctk", "q4_0", "-ctv", "q4_0"], "bits=4", "kivi", ["kivi", "q4_0 has 4.50", "larger type"]),
        (["-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0"], "", "minikv", ["minikv", "evicts", "drop -ctk"]),
        (["-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0"], "", "specache", ["specache", "second tier", "drop -ctk"]),
        (["-fa", "on", "-ctk", "q8_0", "-ctv", "q4_0"], "", "", ["q8_0", "q4_0", "one type", "KVQ_METHOD"]),
        (["-fa", "on"], "", "nosuch", ["nosuch", "xquant"]),
        (["-fa", "on"], "bits=9", "kivi", ["bits=9", "1..4"]),
        (["-fa", "on"], "colour=red", "kivi", ["colour", "bits"]),
    ],
)
def test_refused_at_load_with_one_line(
    demo_model: Path, args: list[str], opts: str, method: str, words: list[str]
) -> None:
    r = program(
        "llama-completion",
        "-m",
        demo_model,
        "-dev",
        "KVQ0",
        *args,
        "-n",
        "4",
        "-p",
        "x",
        "-no-cnv",
        method=method,
        opts=opts,
    )
    lines = [x for x in r.stderr.splitlines() if "ggml-kvq: error:" in x]
    assert r.returncode > 0 and len(lines) == 1, r.stderr
    assert all(w in lines[0] for w in words), lines


@pytest.fixture(params=["xquant", "zipcache", "minikv", "specache"])
def server(demo_model: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {
        **os.environ,
        "GGML_BACKEND_PATH": str(_paths.backend()),
        "KVQ_METHOD": request.param,
        "KVQ_OPTS": (
            "lo=4" if request.param == "zipcache" else ""
        ),  # how prompts are cut decides which rows probe, and 2 bits would show it
    }
    argv = [
        str(_paths.program("llama-server")),
        "-m",
        str(demo_model),
        "-dev",
        "KVQ0",
        "-fa",
        "on",
        "-c",
        "4096",
        "-np",
        "2",
    ]
    p = subprocess.Popen(
        [*argv, "--no-kv-unified", "--port", str(port), "--host", "127.0.0.1"],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            assert p.poll() is None, "llama-server ended"
            try:
                if urllib.request.urlopen(url + "/health", timeout=2).status == 200:
                    break
            except OSError:
                time.sleep(0.5)
        yield url
    finally:
        p.terminate()
        p.wait(30)


@pytest.mark.parametrize(
    ("method", "limit"),
    [("f16", 1e-4), ("kivi", 1e-3), ("xquant", 1e-2), ("zipcache", 1e-3), ("minikv", 1e-2), ("specache", 1e-3)],
)
def test_two_streams_in_one_batch_answer_as_alone(demo_model: Path, method: str, limit: float) -> None:
    tokens = Model(demo_model).tokenize(TEXT, add_bos=True)
    halves = [tokens[:200], tokens[300:500]]
    rows = []
    for together in (False, True):
        c = Context(demo_model, method, "", 2, unified=False)
        for start, stop in ((0, 100), (100, 200)):
            parts = [h[start:stop] for h in halves]
            out = c.decode_both(parts, start) if together else [c.decode(s, p, start) for s, p in enumerate(parts)]
        for i in range(200, 240):
            parts = [[tokens[i]], [tokens[i + 300]]]
            out = c.decode_both(parts, i) if together else [c.decode(s, p, i) for s, p in enumerate(parts)]
        rows.append(out)
        c.close()
    for p, q in zip(*rows, strict=True):
        assert abs(float((np.exp(p) * (p - q)).sum())) < limit


def complete(url: str, prompt: str, slot: int) -> str:
    body = {
        "prompt": prompt,
        "n_predict": 100,
        "temperature": 0,
        "id_slot": slot,
        "cache_prompt": False,
    }
    request = urllib.request.Request(
        url + "/completion",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    return str(json.loads(urllib.request.urlopen(request, timeout=240).read())["content"])


def test_two_parallel_slots_answer_as_alone(server: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    # within the f16 window, because how a server cuts prompts into ubatches decides what later tokens see exactly;
    # pages are sealed during generation. Repeating, so that rounding decides no token.
    prompts = ["red: 5\ngreen: 7\nblue: 9\n" * 7, "one: 1\ntwo: 2\nthree: 3\n" * 7]
    alone = [complete(server, p, slot) for slot, p in enumerate(prompts)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(complete, [server] * 2, prompts, [0, 1]))
    assert together == alone
