"""Multi-head latent attention: one KV head whose keys are two blocks, values the first of them or both
(KVQ_ATTN_LATENT, _ALL).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ggml_kvq import Model, errors
from ggml_kvq.core import kernels, loader
from ggml_kvq.reference import AFFINE, F16, LATTICE, Codec, K
from test_llama_features import random_walk

ROOT = Path(__file__).resolve().parent.parent
LATENT, LATENT_ALL = 4, 8  # ggml-kvq.h
CELLS = 32


def codec(kind: str, d: int) -> Codec:
    if kind == "f16":
        return Codec(F16, K, 16, 32, 0, 0, 0.0, CELLS, d)
    if kind.startswith("affine"):
        return Codec(AFFINE, K, int(kind[6:]), 32, 0, 0, 0.0, CELLS, d)
    return Codec(LATTICE, K, int(kind[7:]), 2, 1, 0, 0.0, CELLS, d)


def pages_and_rows(
    rng: np.random.Generator, codecs: tuple[Codec, Codec], n_pages: int, open_pages: int
) -> tuple[list[kernels.Page], np.ndarray]:
    """Pages of both blocks, and what is in them: f64 [cells, channels of both]. The last `open_pages` are f16
    tiles, the first as well.
    """
    lib = loader.libraries().need_kvq()
    pages, rows = [], []
    for p in range(n_pages):
        lanes: list[Any] = []
        parts: list[Any] = []
        for c in codecs:
            d = c.head_size
            x = (rng.normal(size=(1, CELLS, d)) * np.exp(0.5 * rng.normal(size=d))).astype(np.float16)
            if c.type == F16 or p == 0 or p >= n_pages - open_pages:
                tile = np.zeros((1, CELLS, -(-d // 16) * 16), np.float16)
                tile[:, :, :d] = x
                lanes.append(tile)
                parts.append(x[0])
            else:
                block = kernels.encode(lib, c, x[0])
                lanes.append(tuple(b[None] for b in block))
                parts.append(kernels.decode(lib, c, *block))
        pages.append(kernels.Page(lanes[0], lanes[1], CELLS, p * CELLS))
        rows.append(np.concatenate(parts, axis=1).astype(np.float64))
    return pages, np.concatenate(rows)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "kind", ["f16", "affine4", "affine2", "affine1", "affine3", "lattice4", "lattice2", "lattice1"]
)
@pytest.mark.parametrize(
    ("first", "second", "n_head", "n_q", "all_of_it", "softcap"),
    [
        (512, 64, 16, 1, False, 0.0),
        (512, 64, 128, 1, False, 0.0),  # two blocks of rows
        (512, 64, 5, 7, False, 0.0),
        (256, 64, 40, 2, False, 30.0),
        (256, 256, 8, 3, True, 0.0),  # keys without a rotary part are values altogether
        (72, 40, 3, 5, False, 0.0),  # padded rows
        (48, 24, 2, 1, True, 0.0),
    ],
)
def test_attention_against_f64(
    first: int, second: int, n_head: int, n_q: int, all_of_it: bool, softcap: float, kind: str, threads: int
) -> None:
    rng = np.random.default_rng(first + second + n_q)
    codecs = codec(kind, first), codec(kind, second)
    pages, rows = pages_and_rows(rng, codecs, 9, 2)
    n_kv = 9 * CELLS - 5
    q = (0.3 * rng.normal(size=(n_q, n_head, first + second))).astype(np.float32)
    mask = np.zeros((n_q, 1, n_kv), np.float16)
    mask[:, 0, :] = np.where(np.arange(n_kv)[None] > (n_kv - n_q + np.arange(n_q))[:, None], -np.inf, 0)
    mask[:, 0, 40:70] = -np.inf
    width = first + second if all_of_it else first
    dst = np.full((n_q, n_head, width + 3), 7e8, np.float32)
    scale = np.float32(1 / np.sqrt(first + second))
    stream = kernels.Stream(
        codecs[0],
        codecs[1],
        1,
        n_kv,
        pages,
        q,
        dst[:, :, :width],
        float(scale),
        mask,
        0.0,
        softcap,
        None,
        LATENT_ALL if all_of_it else LATENT,
    )
    kernels.attend(loader.libraries().need_kvq(), [stream], threads)

    logits = np.einsum("qhd,td->qht", q.astype(np.float64), rows[:n_kv]) * scale
    logits = softcap * np.tanh(logits / softcap) if softcap else logits
    logits = logits + mask.astype(np.float64)
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    want = np.einsum("qht,td->qhd", p / p.sum(axis=-1, keepdims=True), rows[:n_kv, :width])
    assert (dst[:, :, width:] == np.float32(7e8)).all(), "wrote behind a row"
    error = np.abs(dst[:, :, :width] - want).max() / np.abs(want).max()
    assert error < 1e-3, error


def test_impossible_latent_attention_is_refused() -> None:
    lib = loader.libraries().need_kvq()
    rng = np.random.default_rng(0)

    def attempt(**change: Any) -> str:
        codecs = codec("affine2", 72), codec("affine2", 24)
        pages, _ = pages_and_rows(rng, codecs, 3, 1)
        stream = kernels.Stream(
            codecs[0],
            codecs[1],
            1,
            90,
            pages,
            np.zeros((1, 2, 96), np.float32),
            np.zeros((1, 2, 96), np.float32),
            1.0,
            None,
        )
        stream.flags = LATENT
        for key, value in change.items():
            setattr(stream, key, value)
        with pytest.raises(errors.MethodError) as e:
            kernels.attend(lib, [stream])
        return str(e.value)

    assert "multiple of 16" in attempt(flags=LATENT_ALL)
    assert "one KV head" in attempt(n_head_kv=2)
    assert "as keys" in attempt(v=codec("affine2", 24).with_(role=1))


# ------------------------------------------------------------------ whole models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sys.path.insert(0, str(ROOT / "scripts"))
    import bench_cpu

    path = tmp_path_factory.mktemp("latent") / "latent.gguf"
    bench_cpu.make_latent_model(path, 8)
    return path


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, 250, n).tolist()


def divergence(a: np.ndarray, b: np.ndarray) -> float:
    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64) - x.max(axis=-1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))

    p, q = log_softmax(a), log_softmax(b)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())


def logits_of(m: Model, ids: list[int]) -> np.ndarray:
    return np.concatenate([x.copy() for x in m.feed(ids)])


def opened(path: Path, method: str, opts: dict[str, Any] | None = None) -> Model:
    return Model(path, kv_method=method, kv_opts=opts, n_ctx=1024, n_ubatch=64, n_batch=64, n_threads=2)


def test_divergence_falls_with_bits(model: Path) -> None:
    """f16 gives upstream's logits; codes read as keys and as values cost more the fewer bits they have."""
    ids = tokens(600)
    with opened(model, "upstream") as m:
        want = m.logits(ids)[300:]
    found = {}
    for method, opts in (
        ("f16", None),
        ("kivi", {"bits": 4}),
        ("higgs", {"bits": 4}),
        ("higgs", {"bits": 2}),
        ("higgs", {"bits": 1, "grid": "d8"}),
    ):
        with opened(model, method, opts) as m:
            got = m.logits(ids)[300:]
            found[f"{method}-{(opts or {}).get('bits', 16)}"] = divergence(want, got)
            assert m.kv_stats()["n_sealed"] > 0 or method == "f16"
    assert found["f16-16"] < 1e-3  # upstream accumulates in f16
    assert found["kivi-4"] < found["higgs-2"] < found["higgs-1"] and found["higgs-4"] < found["higgs-2"] / 3, found
    print(found)


def test_kivi_reads_what_it_stores(model: Path) -> None:
    """A window that holds the context makes no difference to f16; without one, codes are read."""
    ids = tokens(400)
    with opened(model, "f16") as m:
        want = m.logits(ids)
    with opened(model, "kivi", {"bits": 2, "window": 1024}) as m:
        assert divergence(want, m.logits(ids)) < 1e-6
    with opened(model, "kivi", {"bits": 2, "window": 0}) as m:
        assert divergence(want, m.logits(ids)) > 1e-4


@pytest.mark.parametrize(
    ("method", "opts"), [("f16", None), ("kivi", {"bits": 4, "window": 64}), ("higgs", {"bits": 2})]
)
def test_saved_states_restore_both_blocks(
    model: Path, tmp_path: Path, method: str, opts: dict[str, Any] | None
) -> None:
    ids, more = tokens(416), tokens(40, 1)
    with opened(model, method, opts) as m:
        logits_of(m, ids)
        m.save_state(tmp_path / "state")
        want = logits_of(m, more)
    with opened(model, method, opts) as m:
        m.load_state(tmp_path / "state")
        got = logits_of(m, more)
    assert divergence(want, got) < 1e-6


def test_methods_without_latent_attention_say_so(model: Path) -> None:
    for method, opts in (("zipcache", None), ("minikv", None), ("xquant", None), ("aqua", {"predictor": "none"})):
        with pytest.raises(errors.KvqError, match="use kivi, higgs or f16"), opened(model, method, opts):
            pass
    with (
        pytest.raises(errors.KvqError, match="the same k_bits and v_bits"),
        opened(model, "kivi", {"k_bits": 4, "v_bits": 2}),
    ):
        pass


def test_load_line_names_the_blocks(model: Path) -> None:
    with opened(model, "higgs", {"bits": 2}) as m:
        lib = loader.libraries().need_kvq()
        line = lib.kvq_cache_line(lib.kvq_cache_count() - 1).decode()
        stats = m.kv_stats()
    assert "latent " in line and "rotary part " in line, line
    assert stats["bytes_f16"] == 4 * 1024 * (512 + 64) * 2


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@pytest.mark.parametrize(
    ("method", "opts", "limit"), [("f16", "", 2e-3), ("kivi", "bits=4", 0.03), ("higgs", "bits=4", 0.06)]
)
def test_random_walk_follows_upstream(model: Path, method: str, opts: str, limit: float, unified: bool) -> None:
    """Decode, rollback, copy, context shift (which rotates the second block alone), save, restore and clear."""
    kld = random_walk(model, method, opts, unified, 120, 11, tokens(2000, 3))
    print(f"{len(kld)} decodes, KLD mean {np.mean(kld):.5f} max {np.max(kld):.5f}")
    assert len(kld) > 40 and np.mean(kld) < limit and np.max(kld) < 10 * limit
