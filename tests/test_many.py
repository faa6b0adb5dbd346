"""generate_many: many prompts over the sequences of one context."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ggml_kvq import Model, Sampling
from ggml_kvq.errors import ContextOverflowError, KvqError

PROMPTS = [
    "NAME\n       ls - list directory contents\n",
    "The file",
    "SYNOPSIS\n       cat [OPTION]... [FILE]...\n\nDESCRIPTION\n",
    "A process that",
    "Options:",
    "EXIT STATUS",
    "The kernel keeps",
]


@pytest.mark.parametrize(("method", "opts"), [("upstream", None), ("f16", None), ("kivi", "bits=4"), ("higgs", None)])
@pytest.mark.parametrize("n_seq_max", [1, 3])
def test_equal_to_generate_text_for_text(demo_model: Path, method: str, opts: str | None, n_seq_max: int) -> None:
    """At temperature 0. More prompts than sequences: they take each other's place."""
    with Model(demo_model, method, opts, n_ctx=512 * n_seq_max, n_seq_max=n_seq_max, n_threads=2) as model:
        many = model.generate_many(PROMPTS, max_tokens=24, temperature=0)
        reasons = model.finish_reasons
        assert not model.tokens
        for prompt, text, reason in zip(PROMPTS, many, reasons, strict=True):
            assert text == "".join(model.generate(prompt, max_tokens=24, temperature=0)), prompt
            assert reason == model.finish_reason


def test_each_has_its_own_sampling_and_stop(demo_model: Path) -> None:
    with Model(demo_model, "f16", n_ctx=1024, n_seq_max=2, n_threads=2) as model:
        own = [Sampling(temperature=0), Sampling(temperature=1.5, seed=7), Sampling(temperature=1.5, seed=7)]
        a = model.generate_many(["The file"] * 3, max_tokens=16, sampling=own)
        assert a[1] == a[2] != a[0]
        plain = model.generate_many(["The file"], max_tokens=16, temperature=0)[0]
        assert a[0] == plain
        stop = plain[5:8]
        assert model.generate_many(["The file"], max_tokens=16, temperature=0, stop=stop) == [plain.split(stop)[0]]
        assert model.finish_reasons == ["stop"]
        assert model.generate_many([], max_tokens=4) == [] and model.generate_many(["a"], max_tokens=0) == [""]
        with pytest.raises(KvqError, match="2 samplings for 1 prompts"):
            model.generate_many(["a"], sampling=own[:2])
        with pytest.raises(ContextOverflowError, match=r"prompt 1 has \d+ tokens"):
            model.generate_many(["a", "word " * 2000])
        assert model.generate_many(["The file"], max_tokens=16, temperature=0) == [plain]


def test_a_long_prompt_comes_in_parts(demo_model: Path) -> None:
    """Batches of 64 tokens, beside a text that is being written; a full sequence ends with "context"."""
    with Model(demo_model, "f16", n_ctx=512, n_batch=64, n_seq_max=2, n_threads=2) as model:
        long = "The cache holds rows of keys and of values. " * 12
        texts = model.generate_many(["The file", long, "A process"], max_tokens=-1, temperature=0)
        assert all(r in ("eos", "context") for r in model.finish_reasons) and len(texts) == 3
        one = "".join(model.generate(long, max_tokens=20, temperature=0))
        assert texts[1].startswith(one[:40])


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_an_embedding_is_that_of_upstreams_cache(demo_model: Path, pooling: str) -> None:
    """Model had no embeddings. Texts that are alike lie nearer than others, under every cache."""
    text = PROMPTS[0] * 12  # behind the window, so that codes are read
    other = "int main(void) { return 0; }\n" * 12
    rows = {}
    for method, opts in (("upstream", None), ("f16", None), ("kivi", "bits=4,window=32"), ("auto", "bits=4.25")):
        with Model(demo_model, method, opts, n_ctx=1024, n_threads=2) as model:
            rows[method] = model.embed(text, pooling=pooling)
            assert rows[method].shape == (model.embed(other).size,) and not model.tokens
            assert np.linalg.norm(rows[method]) == pytest.approx(1, abs=1e-5)
            alike, far = model.embed(text + "ls"), model.embed(other)
            if pooling == "mean":
                assert rows[method] @ alike > rows[method] @ far
            assert len("".join(model.generate(PROMPTS[0], max_tokens=8, temperature=0))) > 4  # as before
            with pytest.raises(KvqError, match="pooling='max' is unknown; pass 'mean' or 'last'"):
                model.embed(text, pooling="max")
            with pytest.raises(KvqError, match="has no token; pass some text"):
                model.embed([])
    assert rows["f16"] @ rows["upstream"] > 0.9995
    assert rows["kivi"] @ rows["upstream"] > 0.98 and rows["auto"] @ rows["upstream"] > 0.98
