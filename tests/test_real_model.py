"""A short measurement on a pretrained model, SmolLM2 135M: near lossless caches are near lossless there, too.

Models of our own can hide what pretrained ones show. The model is not in this tree: `ggml-kvq fetch smollm2` (93 MB).
With NEED_MODELS it has to be there, as in CI.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from conftest import ROOT
from ggml_kvq import named
from ggml_kvq.evaluate import perplexity, specs

MODEL = named.find("smollm2")
PATH = MODEL.path()  # of the user's cache folder; the tests' own comes later
N_CTX, N_UBATCH = 1024, 128
TEXTS = sorted((ROOT / "docs" / "papers").glob("*.md"))
#: nats a token that a cache may diverge: .0132 and .0079 were measured in November 2026, and .04 for q4_0
BARS = {"kivi:bits=4": 0.022, "auto:bits=4.25,at=131072": 0.015}

if not MODEL.is_there() and os.environ.get("NEED_MODELS"):
    raise RuntimeError(f"NEED_MODELS is set and there is no {PATH}; run: ggml-kvq fetch {MODEL.name}")
pytestmark = pytest.mark.skipif(not MODEL.is_there(), reason=f"no {PATH}; run: ggml-kvq fetch {MODEL.name}")


def size() -> dict[str, int]:
    return {"n_ctx": N_CTX, "n_batch": N_UBATCH, "n_ubatch": N_UBATCH}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[perplexity.BaseFile]:
    """The f16 cache of llama.cpp over one window. Means are measured anew: by this tree's code, into a folder here."""
    folder = tmp_path_factory.mktemp("real")
    before = os.environ.get("KVQ_CACHE_DIR")
    os.environ["KVQ_CACHE_DIR"] = str(folder)
    protocol = perplexity.Protocol(N_CTX, N_UBATCH, max_chunks=1)
    with specs.parse("f16").open(PATH, **size()) as model:
        tokens = perplexity.text_tokens(model, "\n".join(p.read_text() for p in TEXTS))
        out = perplexity.BaseFile(folder / "f16.base", protocol, protocol.windows(tokens), model.n_vocab)
        out.write(model)
    yield out
    os.environ.pop("KVQ_CACHE_DIR")
    if before is not None:
        os.environ["KVQ_CACHE_DIR"] = before


def measured(base: perplexity.BaseFile, cache: str) -> tuple[float, float, float]:
    """(mean divergence, perplexity, share of what was scored that read codes) of a cache."""
    codes = perplexity.CodesRead()
    with specs.parse(cache).open(PATH, **size()) as model:
        out = perplexity.divergence(model, base, None, codes)
    return float(np.concatenate(out.kld).mean()), float(out.summary()["ppl"]), codes.share()


@pytest.mark.parametrize("cache", BARS)
def test_near_lossless(base: perplexity.BaseFile, cache: str) -> None:
    kld, ppl, read = measured(base, cache)
    print(f"{cache}: {kld:.4f}, perplexity {ppl:.1f}")
    assert read == 1.0, "the window is so short that no codes were read"
    assert 0 < kld < BARS[cache]
    assert 5 < ppl < 150, "this is no language"


def test_the_bars_tell_a_worse_cache(base: perplexity.BaseFile) -> None:
    """llama.cpp's q4_0, at 4.5 bits, is over them: a cache as bad as that does not pass."""
    kld, _, _ = measured(base, "upstream:q4_0")
    assert kld > 1.2 * max(BARS.values())


def test_f16_is_as_near_to_upstream_as_upstream_to_itself() -> None:
    """Upstream attends in one way from 64 rows on and in another below. What we differ by is no more than that."""
    from ggml_kvq import Model

    logits = {}
    for method, n_ubatch in (("upstream", 512), ("upstream", 16), ("f16", 512), ("f16", 16)):
        with Model(PATH, method, n_ctx=512, n_batch=512, n_ubatch=n_ubatch, n_threads=2) as m:
            ids = m.tokenize(TEXTS[0].read_text(), add_bos=True)[:384]
            logits[method, n_ubatch] = m.logits(ids)[::4]

    def apart(a: tuple[str, int], b: tuple[str, int]) -> float:
        return float(np.square(logits[a] - logits[b]).mean() / np.square(logits[b]).mean())

    itself = apart(("upstream", 16), ("upstream", 512))
    assert 0 < apart(("f16", 512), ("upstream", 512)) < 1.3 * itself < 1e-3
    assert apart(("f16", 16), ("f16", 512)) < 0.3 * itself
