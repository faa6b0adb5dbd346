"""MiniKV: budgets, true bits, and the method in a model. What stays of a prompt is tested in
tests/native/test_slots.cpp.
"""

from __future__ import annotations

from ctypes import CDLL, POINTER, c_float
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from ggml_kvq import Model
from ggml_kvq.core import loader, native
from ggml_kvq.reference import METHODS, LayerShape
from ggml_kvq.reference.minikv import pyramid

DEMO = Path(__file__).resolve().parent.parent / "models" / "kvq-demo-q8_0.gguf"
TEXT = "The register file holds sixteen words. Each word is read by the decoder before the next cycle begins. " * 30


@pytest.fixture(scope="module")
def lib() -> Any:
    return loader.libraries().need_kvq()


def test_pyramid() -> None:
    """The mean is hh, lower layers keep more; the code's end points at hh = 0.25, depth 7."""
    for n_layer in (2, 16, 32):
        shares = [pyramid(0.25, 7, i, n_layer) for i in range(n_layer)]
        assert np.mean(shares) == pytest.approx(0.25) and all(np.diff(shares) < 0)
        assert shares[0] == pytest.approx(0.4643, abs=1e-4) and shares[-1] == pytest.approx(0.0357, abs=1e-4)
    assert pyramid(0.25, 1, 3, 8) == pytest.approx(0.25)
    layers = [LayerShape(i, 4, 64, 64) for i in range(8)]
    plans = METHODS["minikv"](budget="pyramid").plans(layers)
    assert np.mean([p.keep for p in plans]) == pytest.approx(0.5) and all(p.recent == 0.25 for p in plans)


def test_store_follows_the_budget(lib: CDLL) -> None:
    """Pages of a layer = ceil(keep * pages), so bytes of codes are known (MiniKV, arXiv 2411.18077)."""
    shapes = [(i, 4, 64, 64) for i in range(16)]
    half = native.plan(lib, "minikv", "", shapes, 4096)
    whole = native.plan(lib, "minikv", "hh=0.75", shapes, 4096)
    kivi = native.plan(lib, "kivi", "group=16,scales=u8", shapes, 4096)
    assert half["bytes_codes"] * 2 == whole["bytes_codes"] == kivi["bytes_codes"]
    assert half["bytes_params"] * 2 == whole["bytes_params"] == kivi["bytes_params"]
    assert half["bits"] <= 2.4 and half["bits_headline"] == 1.0
    pages = [int(np.ceil(np.float32(min(pyramid(0.25, 7, i, 16) + 0.25, 1)) * np.float32(128))) for i in range(16)]
    cone = native.plan(lib, "minikv", "budget=pyramid", shapes, 4096)
    assert cone["bytes_codes"] == half["bytes_codes"] // (16 * 64) * sum(pages)


def open_model(opts: str, method: str = "minikv", **kwargs: Any) -> Model:
    sizes: dict[str, Any] = {"n_ctx": 1024, "n_batch": 512, "n_ubatch": 256, "n_threads": 2, **kwargs}
    return Model(DEMO, method, opts, **sizes)


def test_all_kept_is_kivi_with_groups_of_16() -> None:
    with open_model("hh=0.75") as a, open_model("group=16,scales=u8", "kivi") as b:
        tokens = a.tokenize(TEXT, add_bos=True)[:600]
        p, q = a.logits(tokens), b.logits(tokens)
    assert np.abs(p - q).max() < 0.05 * np.abs(q).max()  # pages are visited in another order


def test_a_full_context_is_served() -> None:
    """A prompt as long as the context, twice what the store holds."""
    with open_model("hh=0.25,rw=0.25") as m:
        tokens = m.tokenize((Path(__file__).parent / "data" / "walk.txt").read_text(), add_bos=True)[:1000]
        assert len(tokens) == 1000
        p, stats = m.logits(tokens), m.kv_stats()
        with Model(DEMO, "upstream", n_ctx=1024, n_batch=512, n_ubatch=256, n_threads=2) as theirs:
            q = theirs.logits(tokens)
        log_p, log_q = (x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in (p, q))
        kld = (np.exp(log_q) * (log_q - log_p)).sum(1)
        print(f"KLD of the first ubatch {kld[:256].mean():.5f}, of the last {kld[768:].mean():.3f}")
        assert kld[:256].mean() < 0.01  # nothing is evicted yet
        assert kld[768:].mean() < 0.3 and (p[768:].argmax(1) == q[768:].argmax(1)).mean() > 0.6
        assert (
            stats["n_sealed"] > 0
            and stats["bytes_codes"] * 2
            == native.plan(
                loader.libraries().need_kvq(),
                "kivi",
                "group=16,scales=u8",
                [(i, m.n_head_kv, 64, 64) for i in range(m.n_layer)],
                1024,
            )["bytes_codes"]
        )


def test_second_prompt_after_generation() -> None:
    """What was kept serves a later turn: the conversation goes on, and equals itself."""
    outs = []
    for _ in range(2):
        with open_model("") as m:
            first = "".join(m.generate(TEXT[:1500], max_tokens=40, temperature=0.0))
            second = "".join(
                m.generate(TEXT[:1500] + first + " And then: " + TEXT[:400], max_tokens=20, temperature=0.0)
            )
            outs.append((first, second))
    assert outs[0] == outs[1] and outs[0][1]


def test_selection_over_the_zipcache_split() -> None:
    """Three classes, evicted, 2 and 4 bits, as options of zipcache: half the store, and the model goes on."""
    lib = loader.libraries().need_kvq()
    shapes = [(il, 4, 64, 64) for il in range(4)]
    all_kept, half = (native.plan(lib, "zipcache", {"keep": k}, shapes, 16000) for k in (1, 0.5))
    assert half["bytes_codes"] == pytest.approx(all_kept["bytes_codes"] / 2, rel=0.02)
    with (
        open_model("keep=0.5,interval=64,salient=0.5", "zipcache") as m,
        open_model("interval=64,salient=0.5", "zipcache") as whole,
    ):
        tokens = m.tokenize(TEXT, add_bos=True)[:700]
        p, q = m.logits(tokens), whole.logits(tokens)
        assert np.isfinite(p).all() and m.kv_stats()["n_sealed"] > 0
        assert (p[-100:].argmax(-1) == q[-100:].argmax(-1)).mean() > 0.8


def column_sums(path: Path, ids: np.ndarray, n_head: int, n_head_kv: int, head: int) -> np.ndarray:
    """[layer, KV head, cell] sums of attention probabilities over all rows of a prompt, by the model's definition
    in numpy.
    """
    weights = {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32) for t in gguf.GGUFReader(path).tensors
    }
    n = len(ids)
    angle = np.outer(np.arange(n), 10000.0 ** (-np.arange(0, head, 2) / head))[:, None]

    def norm(x: Any, name: str) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weights[name]

    def turned(x: Any, heads: int) -> Any:
        x = x.reshape(n, heads, head)
        a, b = x[..., ::2], x[..., 1::2]
        return (
            np.stack([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], -1)
            .reshape(x.shape)
            .astype(np.float32)
        )

    sums: list[Any] = []
    x = weights["token_embd.weight"][ids]
    hidden = np.triu(np.full((n, n), -np.inf, np.float32), 1)
    while f"blk.{len(sums)}.attn_q.weight" in weights:
        w = f"blk.{len(sums)}."
        y = norm(x, w + "attn_norm.weight")
        q, k = turned(y @ weights[w + "attn_q.weight"].T, n_head), turned(y @ weights[w + "attn_k.weight"].T, n_head_kv)
        v = (y @ weights[w + "attn_v.weight"].T).reshape(n, n_head_kv, head)
        group = n_head // n_head_kv
        p = np.einsum("ihd,jhd->hij", q, np.repeat(k, group, 1)) / np.sqrt(head) + hidden
        p = np.exp(p - p.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        sums.append(p.sum(1).reshape(n_head_kv, group, n).sum(1))
        x = (
            x
            + np.einsum("hij,jhd->ihd", p, np.repeat(v, group, 1)).reshape(n, -1) @ weights[w + "attn_output.weight"].T
        )
        y = norm(x, w + "ffn_norm.weight")
        gate = y @ weights[w + "ffn_gate.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ weights[w + "ffn_up.weight"].T)) @ weights[w + "ffn_down.weight"].T
    return np.array(sums)


def test_what_stays_of_a_real_prompt(lib: CDLL) -> None:
    """The cells of the largest explicit column sums, in every layer and head. Weights and activations of 8 bits
    move a few at the edge.
    """
    with open_model("hh=0.5,rw=0,window=32", n_batch=512, n_ubatch=512) as m:
        ids = m.tokenize((Path(__file__).parent / "data" / "manual.md").read_text(), add_bos=True)[:448]
        m.logits(ids)
        n_old = 416  # the window and what the newest page lacks stay open
        rows = np.zeros((448, m.n_head_kv, 64), np.float32)
        sums = column_sums(DEMO, np.asarray(ids), 4, m.n_head_kv, 64)
        assert len(sums) == m.n_layer
        shares = []
        for il in range(m.n_layer):
            assert (
                lib.kvq_cache_rows(lib.kvq_cache_count() - 1, il, 0, 0, 0, 448, rows.ctypes.data_as(POINTER(c_float)))
                == 0
            )
            gone = ((rows == 0) & np.signbit(rows)).all(-1)
            for h in range(m.n_head_kv):
                stays = np.flatnonzero(~gone[:n_old, h])
                assert len(stays) == 192 and not gone[n_old:, h].any()
                shares.append(len(set(stays) & set(np.argsort(-sums[il, h, :n_old])[: len(stays)])) / len(stays))
        assert np.mean(shares) > 0.97 and min(shares) > 0.9
