"""What folding to 8 bits (cpu/kernels.h) changes in a model's answers: KL divergence from the same cache read in f32
arithmetic.

Both read the same saved blocks, and weights are f32. Run freely the two caches would not hold the same: a difference
in the last bit of a hidden state turns some codes of later tokens over, whatever the arithmetic; and so do q8_0
weights, for which llama.cpp rounds activations to 8 bits. Another model: PRECISION_MODEL=FILE.gguf python -m pytest -s
tests/test_precision.py
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dequantize import dequantize_model
from ggml_kvq import Model

ROOT = Path(__file__).resolve().parent.parent
MODEL = Path(os.environ.get("PRECISION_MODEL", ROOT / "models/kvq-demo-q8_0.gguf"))
N_PAST, N_NEW = 1536, 64


def log_softmax(x: Any) -> Any:
    x = x.astype(np.float64) - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return dequantize_model(MODEL, tmp_path_factory.mktemp("f32") / "f32.gguf")


def answers(model: Any, method: str, opts: Any, state: Any, tokens: Any) -> Any:
    """Log-probabilities after the last N_NEW tokens, which one call decodes behind the saved ones."""
    with Model(model, kv_method=method, kv_opts=opts, n_ctx=2048, n_threads=2) as m:
        if not state.exists():
            for _ in m.feed(tokens[:N_PAST]):
                pass
            m.save_state(state)
        m.load_state(state)
        (out,) = m.feed(tokens[N_PAST:], outputs=np.ones(N_NEW, bool), n_ubatch=N_NEW)
        return log_softmax(np.array(out))


@pytest.fixture(scope="module")
def tokens(model: Any) -> Any:
    """A fixed text: limits depend on it."""
    with Model(model, kv_method="f16", n_ctx=256) as m:
        tokens = m.tokenize((ROOT / "tests/data/manual.md").read_text(), add_bos=True)[: N_PAST + N_NEW]
    assert len(tokens) == N_PAST + N_NEW
    return tokens


@pytest.fixture(scope="module")
def f16(model: Any, tokens: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What all methods are held against, computed once."""
    return answers(model, "f16", "", tmp_path_factory.mktemp("f16") / "state", tokens)


@pytest.mark.parametrize(
    "method, opts",
    [
        ("kivi", "bits=2"),
        ("kivi", "bits=4"),
        ("xquant", "preset=1.38"),
        ("higgs", "bits=2"),
        ("higgs", "bits=4"),
        ("higgs", "bits=1,grid=d8"),
    ],
)
def test_folding_changes_answers_less_than_codes_do(
    model: Any, tokens: Any, f16: Any, tmp_path: Path, method: str, opts: Any
) -> None:
    state = tmp_path / "state"
    folded, exact = (answers(model, method, f"{opts},precision={p}", state, tokens) for p in ("int8", "f32"))
    kld = float((np.exp(exact) * (exact - folded)).sum(-1).mean())
    codes = float((np.exp(f16) * (f16 - exact)).sum(-1).mean())
    print(f"{method} {opts}: folding {kld:.2e}, codes {codes:.2e} nats")
    assert 0 < kld < 1e-4
    assert kld < codes / 10
