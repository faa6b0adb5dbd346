"""window=auto: memory that blocks do not take yet holds tokens as they came, so a short text is exact and a long one
compressed; and what comes after a long one is as exact as before it.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from ggml_kvq import Model, errors
from ggml_kvq.core import loader, native
from ggml_kvq.reference import METHODS
from test_llama_features import Context

TEXT = (Path(__file__).parent / "data" / "walk.txt").read_text()
LAYERS = [(il, 4, 64, 64) for il in range(12)]
EXACT = [("kivi", "bits=2"), ("higgs", "bits=2"), ("auto", "bits=2.25,at=32768,means=off"), ("xquant", "")]


def opened(path: Path, method: str, opts: str, n_ctx: int) -> Model:
    return Model(path, method, opts or None, n_ctx=n_ctx, n_batch=512, n_ubatch=128, n_threads=2)


def answers(m: Model, ids: list[int], n_last: int, n_ubatch: int = 128) -> npt.NDArray[np.float32]:
    """Logits [n_last, n_vocab] of the last tokens of ids, behind what the cache holds."""
    outputs = np.arange(len(ids)) >= len(ids) - n_last
    return np.concatenate([x.copy() for x in m.feed(ids, outputs=outputs, n_ubatch=n_ubatch)])


def joined(opts: str, more: str) -> str:
    return ",".join(filter(None, (opts, more)))


@pytest.fixture(scope="module")
def ids(demo_model: Path) -> list[int]:
    with opened(demo_model, "f16", "", 256) as m:
        return (m.tokenize(TEXT, add_bos=True) * 4)[:9000]


# ------------------------------------------------------------------ short texts are exact


@pytest.mark.parametrize(("method", "opts"), EXACT, ids=[m for m, _ in EXACT])
def test_2000_tokens_in_room_for_32k_are_those_of_f16(demo_model: Path, ids: list[int], method: str, opts: str) -> None:
    """To the last bit of the logits, and the text that follows."""
    want: npt.NDArray[np.float32] | None = None
    texts = []
    for name, its in (("f16", ""), (method, joined(opts, "window=auto"))):
        with opened(demo_model, name, its, 32768) as m:
            got = answers(m, ids[:1800], 100)
            texts.append("".join(m.generate("", reset=False, max_tokens=200, temperature=0)))
            s = m.kv_stats()
        assert want is None or (got == want).all()
        want = got
    assert texts[0] == texts[1]
    assert s["n_sealed"] == 0 and s["bits"] < 3.6


def test_with_means_the_text_is_that_of_f16(demo_model: Path, ids: list[int]) -> None:
    """--kv-bits: keys carry their position in the last bit of 64 channels, so logits differ in the last digits."""
    texts = []
    for words in ({"kv_method": "f16"}, {"kv_bits": 2.25, "kv_opts": "window=auto,at=32768"}):
        with Model(demo_model, **words, n_ctx=32768, n_batch=512, n_ubatch=128, n_threads=2) as m:
            for _ in m.feed(ids[:1800]):
                pass
            texts.append("".join(m.generate("", reset=False, max_tokens=150, temperature=0)))
            s = m.kv_stats()
    assert texts[0] == texts[1]
    assert s["n_sealed"] == 0 and s["bits"] <= 2.25


@pytest.mark.parametrize(("method", "opts"), EXACT, ids=[m for m, _ in EXACT])
def test_after_a_long_text_a_short_one_is_exact_again(demo_model: Path, ids: list[int], method: str, opts: str) -> None:
    n_ctx = 4096
    with opened(demo_model, "f16", "", n_ctx) as m:
        want = answers(m, ids[:300], 50)
    with opened(demo_model, method, joined(opts, "window=auto"), n_ctx) as m:
        answers(m, ids[:4000], 1)
        n_sealed = m.kv_stats()["n_sealed"]
        assert n_sealed > 500
        m.truncate(0)  # llama_memory_seq_rm: the store is not told
        assert (answers(m, ids[:300], 50) == want).all()
        assert m.kv_stats()["n_sealed"] == n_sealed
        m.truncate(100)  # and a part of it
        assert (answers(m, ids[100:300], 50, 16)[-1:] == answers_of(m, ids, 16)).all()


def answers_of(m: Model, ids: list[int], n_ubatch: int) -> npt.NDArray[np.float32]:
    m.reset()
    answers(m, ids[:100], 1)
    return answers(m, ids[100:300], 1, n_ubatch)


# ------------------------------------------------------------------ long ones are as with the least window


@pytest.mark.parametrize(("method", "opts"), EXACT, ids=[m for m, _ in EXACT])
def test_a_full_context_loses_no_more_than_with_the_least_window(
    demo_model: Path, ids: list[int], method: str, opts: str
) -> None:
    n_ctx, n_last = 3072, 512
    logs = []
    for name, its in (("f16", ""), (method, opts), (method, joined(opts, "window=auto"))):
        with opened(demo_model, name, its, n_ctx) as m:
            x = answers(m, ids[: n_ctx - 8], n_last, 32).astype(np.float64)
            s = m.kv_stats()
        x -= x.max(-1, keepdims=True)
        logs.append(x - np.log(np.exp(x).sum(-1, keepdims=True)))
    kld = [float((np.exp(logs[0]) * (logs[0] - x)).sum(-1).mean()) for x in logs[1:]]
    print(f"{method} {opts}: KLD {kld[0]:.5f}, with window=auto {kld[1]:.5f}")
    assert 0 < kld[1] < 1.1 * kld[0]
    assert s["n_sealed"] > 1000


def test_bytes_are_those_of_the_least_window(demo_model: Path) -> None:
    lib = loader.libraries().need_kvq()
    for method, opts in EXACT:
        for layers in (LAYERS, [(il, 8, 128, 128) for il in range(32)]):
            plain, auto = (
                native.plan(lib, method, its, layers, 32768, n_layer_model=len(layers), n_stream=2)
                for its in (joined(opts, "level=9" if method == "auto" else ""), joined(opts, "window=auto"))
            )
            if method == "auto":
                assert auto["bits"] <= 2.25
                continue
            for part in ("codes", "window"):
                assert auto[f"bytes_{part}"] == plain[f"bytes_{part}"], (method, part)
            assert plain["bits"] <= auto["bits"] < plain["bits"] + 0.02
    with opened(demo_model, "kivi", "window=auto", 2048) as m:
        got, want = m.kv_stats(), native.plan(lib, "kivi", "window=auto", shapes(m), 2048, n_layer_model=m.n_layer)
        assert got["bytes_total"] == want["bytes_total"]
        parts = ("codes", "params", "window", "tables", "calibration", "chain")
        assert got["bytes_total"] == sum(got[f"bytes_{part}"] for part in parts)


def shapes(m: Model) -> list[tuple[int, int, int, int]]:
    return [(il, m.n_head_kv, 64, 64) for il in range(m.n_layer)]


# ------------------------------------------------------------------ saved states


@pytest.mark.parametrize("state", ["rows", "compact"])
@pytest.mark.parametrize(("method", "opts"), EXACT, ids=[m for m, _ in EXACT])
def test_a_state_comes_back_as_it_was(
    demo_model: Path, ids: list[int], tmp_path: Path, method: str, opts: str, state: str
) -> None:
    """A short one that is exact, a long one that is sealed in part; over a cache that another text has filled."""
    its = joined(opts, f"window=auto,state={state}")
    with opened(demo_model, method, its, 2048) as m:
        for n in (150, 1200):
            m.reset()
            answers(m, ids[:n], 1)
            m.save_state(tmp_path / "s")
            data = (tmp_path / "s").read_bytes()
            want = answers(m, ids[n : n + 40], 40, 8)
            m.reset()
            answers(m, ids[2000:4000], 1)
            m.load_state(tmp_path / "s")
            m.save_state(tmp_path / "again")
            assert (tmp_path / "again").read_bytes() == data, n
            assert (answers(m, ids[n : n + 40], 40, 8) == want).all(), n


def test_states_of_other_windows_are_read(demo_model: Path, ids: list[int], tmp_path: Path) -> None:
    for first, second in (("window=auto", "window=64"), ("window=64", "window=auto")):
        with opened(demo_model, "higgs", f"bits=4,{first}", 2048) as m:
            answers(m, ids[:900], 1)
            m.save_state(tmp_path / "s")
            want = answers(m, ids[900:910], 1)
        with opened(demo_model, "higgs", f"bits=4,{second}", 2048) as m:
            assert m.load_state(tmp_path / "s") == 900
            got = answers(m, ids[900:910], 1)
        assert np.abs(got - want).mean() < 0.1 * want.std()


@pytest.mark.parametrize("n_seq", [1, 2])
@pytest.mark.parametrize("opts", ["kivi:bits=4", "higgs:bits=3"])
def test_a_sequence_is_restored_over_one_that_ended(demo_model: Path, ids: list[int], opts: str, n_seq: int) -> None:
    """As a server's prompt cache does it: the long text is removed, not cleared; the short one comes from memory."""
    method, its = opts.split(":")
    c = Context(demo_model, method, its + ",window=auto", n_seq, unified=False)
    c.decode(0, ids[:250], 0)
    short = c.save(0)
    want = [c.decode(0, [ids[250 + i]], 250 + i) for i in range(3)]
    assert c.lib.llama_memory_seq_rm(c.memory, 0, -1, -1)
    c.decode(0, ids[500:1000], 0)
    c.decode(0, ids[1000:1500], 500)
    assert c.lib.llama_memory_seq_rm(c.memory, 0, -1, -1)
    for _ in range(2):
        c.load(0, short)
        assert all((c.decode(0, [ids[250 + i]], 250 + i) == want[i]).all() for i in range(3))
        assert c.lib.llama_memory_seq_rm(c.memory, 0, -1, -1)
    c.close()


# ------------------------------------------------------------------ words


@pytest.mark.parametrize(
    ("method", "opts", "words"),
    [
        ("minikv", "window=auto", ["window=auto", "minikv", "give a number"]),
        ("zipcache", "window=auto", ["window=auto", "zipcache", "give a number"]),
        ("specache", "window=auto", ["window=auto", "specache", "give a number"]),
        ("aqua", "predictor=k,window=auto", ["window=auto", "predictor=k", "predictor=bias"]),
        ("aqua", "predictor=full,window=auto", ["window=auto", "predictor=full", "predictor=bias"]),
        ("kivi", "window=some", ["window=some", "0..4096", "auto"]),
        ("kivi", "window=5000", ["window=5000", "0..4096"]),
        ("kivi", "sinks=auto", ["sinks=auto", "int"]),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(method: str, opts: str, words: list[str]) -> None:
    lib = loader.libraries().need_kvq()
    assert lib.kvq_check(method.encode(), opts.encode()) != 0
    line = lib.kvq_last_error().decode()
    assert all(w in line for w in words) and "\n" not in line


def test_the_definition_in_python_refuses_it() -> None:
    with pytest.raises(ValueError, match="window=auto"):
        METHODS["kivi"](window="auto")


def test_the_load_line_says_how_much_fits(demo_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for opts, least in (("window=auto", 128), ("bits=4,window=auto", 128), ("", 0)):
        with opened(demo_model, "kivi", opts, 8192) as m:
            line = loader.libraries().need_kvq().kvq_cache_line(0).decode()
            found = re.search(r"; window: as much as fits, (\d+) to (\d+) tokens", line)
            assert bool(found) == bool(least), line
            if found:
                assert int(found[1]) == least and 1200 < int(found[2]) < 3000
                ids = (m.tokenize(TEXT, add_bos=True) * 4)[: int(found[2]) + 33]
                answers(m, ids[:-33], 1)
                assert m.kv_stats()["n_sealed"] == 0
                answers(m, ids[-33:], 1)
                assert m.kv_stats()["n_sealed"] > 0
    with pytest.raises(errors.MethodError, match="window=auto"):
        opened(demo_model, "zipcache", "window=auto", 1024)
