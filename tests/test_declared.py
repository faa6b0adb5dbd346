"""Caches that llama.cpp declares in a quantised type (-ctk q4_0): what is stored is the method's, in no more bytes; the
turn of queries, keys and values is undone; states have rows of the declared size.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_sliding_windows
from conftest import ROOT, run_until_said
from ggml_kvq import Model, _paths, gguf_header, methods
from ggml_kvq.core import native
from ggml_kvq.declared import smallest
from ggml_kvq.errors import KvqError
from ggml_kvq.launch import launcher
from test_llama_features import HOLES, TEXT, Context, random_walk

DEMO = ROOT / "models" / "kvq-demo-q8_0.gguf"
ROW = {"q4_0": 18, "iq4_nl": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "q8_0": 34}  # bytes of 32 values


def perplexity(
    text: Path, *args: str | Path, ours: bool = True, env: dict[str, str] | None = None, model: Path = DEMO
) -> subprocess.CompletedProcess[str]:
    more = {"GGML_BACKEND_PATH": str(_paths.backend())} if ours else {}
    device = ["-dev", "KVQ0"] if ours else []
    argv = [_paths.program("llama-perplexity"), "-m", model, "-f", text, "-b", "512", "-t", "2", *device, *args]
    said = "Final estimate: PPL" if "--kl-divergence" not in args else r"Mean\s+KLD"
    return run_until_said(said, [str(x) for x in argv], env={**os.environ, **more, **(env or {})}, timeout=300)


def final(r: subprocess.CompletedProcess[str], words: str = "Final estimate: PPL") -> float:
    found = re.search(words + r"\s*[=:]\s*([-\d.]+)", r.stdout + r.stderr)
    assert r.returncode == 0 and found, r.stderr[-2000:]
    return float(found[1])


def load_line(r: subprocess.CompletedProcess[str], method: str) -> str:
    """llama.cpp's logger, a thread of its own, may have begun the line."""
    found = re.search(f"ggml-kvq: {method}[ ,].* MiB KV cache instead of .*", r.stderr)
    assert found, r.stderr[-2000:]
    return found[0]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT * 4)
    return path


@pytest.mark.parametrize("method", ["kivi", "higgs", "xquant"])
def test_a_declared_type_changes_no_figure(text: Path, method: str) -> None:
    """llama.cpp's turns are left out, so what is stored and read is bit for bit what it is under f16."""
    args, declared = ["-v", "-c", "1024", "--chunks", "2"], ["-ctk", "q4_0", "-ctv", "q4_0"]
    env = {"KVQ_METHOD": method}
    plain = final(perplexity(text, *args, env=env))
    r = perplexity(text, *args, *declared, env=env)
    assert final(r) == plain
    line = load_line(r, method)
    assert "; declared q4_0: 4.50 bits a value" in line and "auto has chosen" not in line
    off = perplexity(text, *args, *declared, env={**env, "LLAMA_ATTN_ROT_DISABLE": "1"})
    assert final(off) == plain
    assert "attn_rot_k = 1" in r.stdout + r.stderr and "attn_rot_k = 0" in off.stdout + off.stderr


def test_a_context_shift_of_declared_keys_is_that_of_f16() -> None:
    """The graph decodes keys, turns and rotates them and copies them back; what is stored is shifted in place."""
    argv = [_paths.program("llama-completion"), "-m", DEMO, "-dev", "KVQ0", "-fa", "on", "-c", "256", "-n", "500"]
    argv += ["--context-shift", "-no-cnv", "--temp", "0", "-t", "2", "-p", "The decoder reads sixteen words"]
    env = {**os.environ, "GGML_BACKEND_PATH": str(_paths.backend()), "KVQ_METHOD": "kivi", "KVQ_OPTS": "bits=4"}
    env["GGML_SCHED_DEBUG"] = "2"
    texts, nodes = [], []
    for declared in ([], ["-ctk", "q8_0", "-ctv", "q8_0", "-v"]):
        r = subprocess.run([*map(str, argv), *declared], env=env, capture_output=True, text=True, timeout=300)
        assert r.returncode == 0, r.stderr[-2000:]
        texts.append(r.stdout)
        nodes.append(re.findall(r"\((?: *)CPY\):.*cache_k_l0", r.stderr + r.stdout))
    assert not nodes[0] and nodes[1]
    n = 1000  # characters: about 256 tokens, and the first shift
    assert len(texts[0]) > n and texts[0][:n] == texts[1][:n]


def test_without_a_method_the_declared_type_chooses_and_is_closer_than_upstream(text: Path, tmp_path: Path) -> None:
    args = ["-c", "2048", "--chunks", "2"]
    base = tmp_path / "base"
    final(perplexity(text, *args, "--kl-divergence-base", base, ours=False), r"Final estimate: PPL")
    args += ["--kl-divergence", "--kl-divergence-base", str(base), "-ctk", "q4_0", "-ctv", "q4_0"]
    theirs = final(perplexity(text, *args, ours=False), r"Mean\s+KLD")
    r = perplexity(text, *args)
    assert final(r, r"Mean\s+KLD") < theirs
    line = load_line(r, "auto")
    size = re.search(r"([\d.]+) MiB KV cache instead", line)
    declared = re.search(r"declared q4_0: 4.50 bits a value, ([\d.]+) MiB, for which auto has chosen", line)
    assert size and declared and float(size[1]) <= float(declared[1]), line


@pytest.mark.parametrize("declared", ["q4_0", "q8_0"])
@pytest.mark.parametrize("n_ctx", [512, 4096])
def test_no_cache_takes_more_than_is_declared(n_ctx: int, declared: str, text: Path, tmp_path: Path) -> None:
    """A sliding window's cache has 768 cells, of which the usual f16 window took more than the declared bits allow.
    Codes end at 4.3 bits: of q8_0's the f16 window takes what they leave.
    """
    model = test_sliding_windows.gemma3(DEMO, tmp_path / "windows.gguf", 3)
    r = perplexity(text, "-c", str(n_ctx), "--chunks", "1", "-ctk", declared, "-ctv", declared, model=model)
    found = re.findall(rf"([\d.]+) MiB KV cache instead of.*declared {declared}: .* a value, ([\d.]+) MiB", r.stderr)
    ours, theirs = (sum(map(float, sizes)) for sizes in zip(*found, strict=True))
    assert len(found) == 2 and 0.8 * theirs < ours <= theirs, found


@pytest.mark.parametrize("declared", ["q4_0", "q8_0"])
@pytest.mark.parametrize("n_ctx", [512, 4096, 16384])
def test_every_context_is_served_without_a_method(declared: str, n_ctx: int, tmp_path: Path) -> None:
    """Positions of all layers were counted as bits of the first one, and contexts of 4096 tokens and more refused."""
    (tmp_path / "prompt.txt").write_text(TEXT[: 2 * min(n_ctx - 64, 3000)])
    argv = [_paths.program("llama-completion"), "-m", DEMO, "-dev", "KVQ0", "-fa", "on", "-ctk", declared]
    argv += ["-ctv", declared, "-c", n_ctx, "-f", tmp_path / "prompt.txt", "-n", 4, "--temp", 0, "-no-cnv", "-t", 2]
    argv += ["--prompt-cache", tmp_path / "state"]
    env = {**os.environ, "GGML_BACKEND_PATH": str(_paths.backend())}
    for _ in range(2):  # the second reads the first one's state
        r = subprocess.run([str(x) for x in argv], env=env, capture_output=True, text=True, timeout=120)
        assert r.returncode == 0 and f"declared {declared}" in load_line(r, "auto"), r.stderr[-2000:]
    assert "exact match for prompt" in r.stderr, r.stderr[-2000:]


def test_launcher_and_model_declare_with_a_method(demo_model: Path) -> None:
    """The flags were refused beside --kv-method; a state of 300 tokens takes 34 bytes for 32 values, not 64."""
    launcher = Path(sys.executable).parent / "llama-completion"
    argv = [str(launcher), "-m", str(demo_model), "--kv-method", "kivi", "-ctk", "q4_0", "-ctv", "q4_0", "-c", "512"]
    r = subprocess.run([*argv, "-p", "a", "-n", "1", "-no-cnv"], capture_output=True, text=True, timeout=120)
    assert r.returncode == 0 and "declared q4_0: 4.50 bits a value" in r.stderr, r.stderr[-2000:]
    sizes = {}
    for declared in ("f16", "q8_0"):
        with Model(demo_model, "kivi", n_ctx=512, type_k=declared, type_v=declared, n_threads=2) as m:
            list(m.generate(m.tokenize(TEXT, add_bos=True)[:300], max_tokens=2, temperature=0))
            libs = m._libs.llama
            sizes[declared] = libs.llama_state_seq_get_size(m._ctx, 0)
    assert sizes["q8_0"] < 0.6 * sizes["f16"]


# KL divergence allowed, mean and worst decode; states at 4.5 bits keep rows of short sequences in 4 bits
WALKS = [
    ("kivi", "bits=4", "q8_0", 0.03, 0.4),
    ("higgs", "bits=4", "q5_1", 0.04, 0.4),
    ("higgs", "bits=4,window=auto", "q8_0", 0.03, 0.4),
    ("zipcache", "interval=64,salient=1", "q8_0", 0.06, 0.4),
    ("xquant", "", "q4_0", 1.5, 12),
    ("auto", "level=41,means=off", "q5_0", 0.1, 1),
    ("aqua", "predictor=none,bits=4", "q8_0", 0.05, 0.5),
]


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@pytest.mark.parametrize(
    ("method", "opts", "declared", "limit", "worst"), WALKS, ids=[f"{m}-{o}-{d}" for m, o, d, *_ in WALKS]
)
def test_random_walk_follows_upstream(
    demo_model: Path, method: str, opts: str, declared: str, limit: float, worst: float, unified: bool
) -> None:
    kld = random_walk(demo_model, method, opts, unified, 120, 11, declared=declared)
    print(f"{method} {opts} {declared}: KLD mean {np.mean(kld):.5f} max {np.max(kld):.5f}")
    assert len(kld) > 40 and np.mean(kld) < limit and np.max(kld) < worst


def rows_of(c: Context, n: int, declared: str) -> int:
    """Bytes of n cells in a state."""
    width = c.model.n_head_kv * 64
    return 2 * n * c.model.n_layer * width // 32 * ROW[declared]


@pytest.mark.parametrize(
    ("method", "opts", "declared"),
    [
        ("kivi", "", "q8_0"),
        ("higgs", "", "q8_0"),
        ("xquant", "", "q5_1"),
        ("zipcache", "salient=1", "q8_0"),
        ("aqua", "predictor=none", "q8_0"),
    ],
)
def test_saved_sequence_reads_back_equal(demo_model: Path, method: str, opts: str, declared: str) -> None:
    c = Context(demo_model, method, opts, 2, unified=False, declared=declared)
    tokens = c.model.tokenize(TEXT, add_bos=True)[:700]
    c.decode(0, tokens[:500], 0)
    c.decode(0, tokens[500:], 500)
    data = c.save(0)
    c.load(1, data)
    n = rows_of(c, 700, declared)
    assert n < len(data) < n + 20 * 700 and c.save(1)[-n:] == data[-n - 4 : -4]
    p, q = c.decode(0, [5, 6, 7], 700), c.decode(1, [5, 6, 7], 700)
    c.close()
    assert np.abs(p - q).max() < 1e-4


@pytest.mark.parametrize(
    ("method", "opts", "declared", "limit"),
    [
        ("kivi", "bits=4", "q8_0", 0.15),
        ("kivi", "", "q4_0", 0.3),
        ("higgs", "bits=4", "q5_0", 0.15),
        ("xquant", "", "q4_0", 0.9),
        ("aqua", "predictor=none,bits=4", "q8_0", 0.15),
        ("auto", "", "q4_1", 0.3),
    ],
)
def test_a_saved_sequence_comes_back_into_cells_that_lie_apart(
    demo_model: Path, method: str, opts: str, declared: str, limit: float
) -> None:
    check_cells_that_lie_apart(demo_model, method, opts, declared, limit)


def check_cells_that_lie_apart(path: Path, method: str, opts: str, declared: str, limit: float) -> None:
    """A saved sequence is loaded around cells of others, and around others again; limit: mean KL divergence."""
    c = Context(path, method, opts, 3, unified=True, declared=declared)
    words = c.model.tokenize(TEXT, add_bos=True)

    def load_around(hole: int, data: bytes) -> None:
        c.lib.llama_memory_clear(c.memory, True)
        c.decode(1, words[600 : 600 + hole], 0)
        c.decode(2, words[700:710], 0)
        assert c.lib.llama_memory_seq_rm(c.memory, 1, -1, -1)
        c.load(0, data)

    def answers(at: int) -> list[np.ndarray[Any, Any]]:
        return [c.decode(0, [words[i]], i) for i in range(at, at + 3)]

    for i in range(0, 400, 100):
        c.decode(0, words[i : i + 100], i)
    first = c.save(0)
    want = answers(400)
    for hole in HOLES:
        load_around(hole, first)
        kld = [float((np.exp(q) * (q - p)).sum()) for p, q in zip(answers(400), want, strict=True)]
        assert np.mean(kld) < limit, (hole, kld)
        load_around(HOLES[-1] + 1 - hole, c.save(0))
        assert np.isfinite(answers(403)).all()
    c.close()


def refused(c: Context, data: bytes, n: int) -> bool:
    """By llama.cpp when it is read, or by the cache when it computes: set_data cannot be told more."""
    c.lib.llama_memory_clear(c.memory, True)
    buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
    if c.lib.llama_state_seq_set_data(c.ctx, buffer, len(data), 0) != len(data):
        return True
    try:
        c.decode(0, [5], n)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("n", [40, 300])
@pytest.mark.parametrize(("method", "declared"), [("kivi", "q4_0"), ("higgs", "q8_0")])
def test_a_changed_byte_of_the_rows_is_refused(demo_model: Path, method: str, declared: str, n: int) -> None:
    c = Context(demo_model, method, "", 1, unified=True, declared=declared)
    c.decode(0, c.model.tokenize(TEXT, add_bos=True)[:n], 0)
    good, rng = c.save(0), random.Random(7)
    first = good.index(b"QBLOCKS1")
    assert not refused(c, good, n)
    seen = 0
    for _ in range(40):
        bad = bytearray(good)
        at = rng.randrange(first, len(bad) - 4)
        bad[at] ^= rng.randrange(1, 256)
        seen += refused(c, bytes(bad), n) or good[at] == 0  # zeros behind the blocks of a tensor carry nothing
    assert seen == 40 and not refused(c, good, n)
    c.close()


def test_rows_of_a_few_cells_stand_alone_and_are_checked(demo_model: Path) -> None:
    c = Context(demo_model, "kivi", "", 1, unified=True, declared="q4_0")
    c.decode(0, c.model.tokenize(TEXT, add_bos=True)[:2], 0)
    good = c.save(0)
    assert b"QBLOCKS1" not in good
    want = c.decode(0, [5], 2)
    c.lib.llama_memory_clear(c.memory, True)
    c.load(0, good)
    got = c.decode(0, [5], 2)
    assert float((np.exp(want) * (want - got)).sum()) < 0.2
    rng, n_rows = random.Random(3), rows_of(c, 2, "q4_0")
    for _ in range(30):
        bad = bytearray(good)
        bad[rng.randrange(len(good) - n_rows, len(good) - 4)] ^= 1 << rng.randrange(8)
        assert refused(c, bytes(bad), 2)
    assert not refused(c, good, 2)
    c.close()


def test_rows_of_upstream_are_refused(demo_model: Path) -> None:
    theirs = Context(demo_model, None, "", 1, unified=True, declared="q4_0")
    theirs.decode(0, theirs.model.tokenize(TEXT, add_bos=True)[:300], 0)
    data = theirs.save(0)
    theirs.close()
    c = Context(demo_model, "kivi", "", 1, unified=True, declared="q4_0")
    assert refused(c, data, 300)
    why = c.model._libs.need_kvq().kvq_last_error().decode()
    assert "keys of layer 0 are q4_0 rows of llama.cpp's own cache" in why and "\n" not in why, why
    c.lib.llama_memory_clear(c.memory, True)
    assert np.isfinite(c.decode(0, [5], 0)).all()
    c.close()


# -------------------------------------------------------------- the launcher declares


def declares(program: str, *argv: str, env: dict[str, str] | None = None) -> list[str]:
    """What the launcher adds of -ctk and -ctv."""
    args = launcher.command(program, ["-m", str(DEMO), *argv], env or {}).args
    return [x for flag in ("-ctk", "-ctv") if flag in args for x in (flag, args[args.index(flag) + 1])]


def test_a_server_declares_the_smallest_type_that_holds_the_method() -> None:
    q4, q5 = (["-ctk", kind, "-ctv", kind] for kind in ("q4_0", "q5_1"))
    assert declares("llama-server", "--kv-method", "kivi") == q4
    assert declares("llama-server", "--kv-method", "kivi", "--kv-opt", "bits=4") == q5
    assert declares("llama-server", "--kv-method", "kivi", "--kv-opt", "declare=f16") == []
    for method in ("f16", "minikv", "specache"):  # their states hold rows of f16
        assert declares("llama-server", "--kv-method", method) == []
    assert declares("llama-server", "--kv-method", "kivi", "-ngl", "8") == q4  # no layer is llama.cpp's
    assert declares("llama-server", "--kv-method", "kivi", "-ot", "ffn=CPU") == []
    assert declares("llama-cli", "--kv-method", "kivi") == []
    assert declares("llama-cli", "--kv-method", "kivi", "--kv-opt", "declare=auto") == q4
    assert declares("llama-cli", "--kv-method", "kivi", "--kv-opt=declare=q8_0")[1] == "q8_0"
    assert declares("llama-server", "--kv-method", "kivi", env={"LLAMA_ARG_CACHE_TYPE_K": "q8_0"}) == []


def test_what_cannot_be_declared_is_refused_with_a_line() -> None:
    for more, words in (
        (("--kv-opt", "declare=q3"), "declare=q3 is no type; choose from auto, f16, q8_0"),
        (("--kv-opt", "declare=q4_0", "-ctk", "q8_0"), "declare=q4_0 and -ctk or -ctv q8_0 both name a type"),
    ):
        with pytest.raises(KvqError) as e:
            declares("llama-server", "--kv-method", "kivi", *more)
        assert words in str(e.value) and "\n" not in str(e.value)


def test_a_plan_names_the_type_that_the_library_then_takes(demo_model: Path) -> None:
    """It holds the codes, and 8 bits of the newest of 1024 tokens: codes of `higgs` with 4 bits alone fit into q4_0."""
    header = gguf_header.read(demo_model, tensors=True)
    for method, opts, kind in (("higgs", "bits=2", "q4_0"), ("higgs", "bits=4", "q4_1"), ("kivi", "bits=4", "q5_1")):
        assert smallest(header, method, opts, None) == (kind, kind)
        Model(demo_model, method, opts, n_ctx=256, type_k=kind, type_v=kind).close()
    Model(demo_model, "higgs", "bits=4", n_ctx=256, type_k="q4_0", type_v="q4_0").close()
    for size, kind in ((80, "f16"), (96, "q4_0")):  # llama.cpp refuses blocks of 32 that do not divide a head
        plan = native.plan(methods.library(), "kivi", "", [(0, 4, size, size)], 256)
        assert (plan["type_k"], plan["type_v"]) == (kind, kind)
    with pytest.raises(KvqError, match="bits a value"):
        Model(demo_model, "kivi", "bits=4", n_ctx=256, type_k="q4_0", type_v="q4_0")
