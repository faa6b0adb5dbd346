"""higgs and aqua under what llama.cpp does to a cache besides decoding (test_llama_features.py): random walks of
decode, rollback, copy, shift, save, restore and clear beside upstream's f16 cache; saved sequences; context shift
that re-quantises nothing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ggml_kvq.calibrate import capture, files, predictors
from test_llama_features import TEXT, Context, random_walk


@pytest.fixture(scope="module")
def own_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with means and predictors inside, fitted on the text of the walks."""
    folder = tmp_path_factory.mktemp("walks")
    model = Path(__file__).resolve().parents[1] / "models" / "kvq-demo-q8_0.gguf"
    full, fold = (
        predictors.fit(
            capture.GgufSource(model, TEXT, 512, 2),
            predictor=p,
            n_sequences=6,
            length=512,
            folder=folder / p,
            n_threads=2,
        )
        for p in ("full", "fold")
    )
    files.write_sidecar(
        folder / "s.gguf",
        files.predictor_fields(model, full, predictors.Bits(), 4),
        {**files.predictor_arrays(fold), **files.predictor_arrays(full)},
    )
    files.embed(model, folder / "s.gguf", folder / "m.gguf")
    return folder / "m.gguf"


# KL divergence allowed, mean and worst decode: twice what was measured, or more
WALKS = [
    ("higgs", "bits=4", 0.035, 0.3),
    ("higgs", "", 0.5, 4),
    ("aqua", "predictor=bias,bits=4", 0.02, 0.4),
    ("aqua", "predictor=bias", 0.3, 2),
    ("aqua", "predictor=k", 0.2, 2),
    ("auto", "level=41,means=off", 0.2, 3),
    ("auto", "level=14,far=f16,prompt=near", 0.05, 0.5),
    ("auto", "level=54,pairs=norm", 0.03, 0.4),
    ("auto", "level=24,pairs=norm,window=32", 0.35, 3.5),
    ("auto", "level=8,pairs=norm,far=f16,prompt=near", 0.05, 0.5),
    ("specache", "near=aqua,prompt=near", 0.05, 0.5),
    ("specache", "near=aqua,bits=1,window=32,top=16", 0.5, 4),
    ("aqua", "predictor=full", 0.1, 1),
    ("aqua", "predictor=full,k_bits=2,v_bits=1,window=32", 0.3, 2),
    ("aqua", "predictor=fold", 0.1, 1),
]


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@pytest.mark.parametrize(("method", "opts", "limit", "worst"), WALKS, ids=[f"{m}-{o}" for m, o, *_ in WALKS])
def test_random_walk_follows_upstream(
    own_model: Path, method: str, opts: str, limit: float, worst: float, unified: bool
) -> None:
    kld = random_walk(own_model, method, opts, unified, 100, 12)
    print(f"{method} {opts}: {len(kld)} decodes, KLD mean {np.mean(kld):.5f} max {np.max(kld):.5f}")
    assert len(kld) > 30 and np.mean(kld) < limit and np.max(kld) < worst


@pytest.mark.parametrize(
    "opts",
    [
        "predictor=bias",
        "predictor=bias shifted",
        "predictor=full",
        "predictor=fold",
        "higgs",
        "auto level=20,pairs=norm",
        "auto level=50,pairs=norm shifted",
    ],
)
def test_saved_sequence_reads_back_equal(own_model: Path, opts: str) -> None:
    """Shifted: blocks keep the position at which they were sealed, which the state carries too."""
    shifted, opts = opts.endswith(" shifted"), opts.removesuffix(" shifted")
    method, opts = opts.split() if opts.startswith("auto") else ("higgs", "") if opts == "higgs" else ("aqua", opts)
    c = Context(own_model, method, opts, 2, unified=False)
    tokens = c.model.tokenize(TEXT, add_bos=True)[:700]
    c.decode(0, tokens[:500], 0)
    c.decode(0, tokens[500:], 500)
    by = 37 if shifted else 0
    if shifted:
        c.lib.llama_memory_seq_add(c.memory, 0, 0, -1, by)
        c.decode(0, [9], 700 + by)
        assert c.lib.llama_memory_seq_rm(c.memory, 0, 700 + by, -1)
    data = c.save(0)
    c.load(1, data)
    n_kv = 2 * 2 * 700 * c.model.n_layer * c.model.n_head_kv * 64  # f16 rows of K and V
    assert c.save(1)[-n_kv:] == data[-n_kv - 4 : -4]  # sequence 0 is followed by the empty cell list of stream 1
    p, q = c.decode(0, [5, 6, 7], 700 + by), c.decode(1, [5, 6, 7], 700 + by)
    c.close()
    assert np.abs(p - q).max() < 1e-4


@pytest.mark.parametrize("predictor", ["bias", "full", "fold"])
def test_a_shift_and_back_changes_nothing(own_model: Path, predictor: str) -> None:
    """Sealed keys hold no position: moving all cells by 96 and back leaves the same blocks, the window loses f16
    rounding only.
    """
    c = Context(own_model, "aqua", f"predictor={predictor},window=32", 1, unified=True)
    tokens = c.model.tokenize(TEXT, add_bos=True)[:500]
    c.decode(0, tokens[:500], 0)
    want = c.decode(0, [5], 500)
    assert c.lib.llama_memory_seq_rm(c.memory, 0, 500, -1)
    for by in (96, -96):
        c.lib.llama_memory_seq_add(c.memory, 0, 0, -1, by)
        got = c.decode(0, [5], 500 + max(by, 0))
        assert c.lib.llama_memory_seq_rm(c.memory, 0, 500 + max(by, 0), -1)
        assert float((np.exp(want) * (want - got)).sum()) < 5e-3, by
    c.close()
