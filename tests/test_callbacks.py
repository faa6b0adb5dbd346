"""A graph is not a ubatch: with an evaluation callback llama.cpp's scheduler computes the nodes asked for one by one.
Logits, text and saved pages are those of whole graphs, wherever the graph is cut.
"""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ggml_kvq import Model
from ggml_kvq.calibrate import capture, files, predictors
from ggml_kvq.core import loader

MODEL = Path(__file__).resolve().parents[1] / "models/kvq-demo-q8_0.gguf"
TEXT = (Path(__file__).parent / "data" / "walk.txt").read_text()
MANUAL = (Path(__file__).parent / "data" / "manual.md").read_text()
#: name: method, options
CACHES: dict[str, tuple[str, str]] = {
    "upstream": ("upstream", ""),
    "f16": ("f16", ""),
    "kivi-2": ("kivi", "bits=2"),
    "kivi-4": ("kivi", "bits=4"),
    "kivi-pooled": ("kivi", "bits=2,window=auto"),
    "higgs": ("higgs", ""),
    "xquant": ("xquant", ""),
    "aqua": ("aqua", "predictor=bias"),
    "aqua-chain": ("aqua", "predictor=full"),
    "auto": ("auto", "bits=3.5"),
    "zipcache": ("zipcache", ""),
    "minikv": ("minikv", ""),
    "specache": ("specache", "near=kivi,group=128,window=32"),
}
#: kinds of nodes of this model's graph, as ggml names their operations
KINDS: tuple[str, ...] = ("GET_ROWS", "RMS_NORM", "MUL", "MUL_MAT", "RESHAPE", "VIEW", "PERMUTE", "ROPE", "SET_ROWS")
KINDS += ("FLASH_ATTN_EXT", "ADD", "SWIGLU")


@dataclass
class Outcome:
    logits: np.ndarray[Any, Any]  # of the last token of every batch
    text: str
    pages: dict[str, Any]  # counts of sealed pages
    state: bytes


@pytest.fixture(scope="module")
def chain_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("callbacks")
    source = capture.GgufSource(MODEL, MANUAL, 256, 1)
    fit = predictors.fit(source, predictor="full", n_sequences=4, length=256, n_threads=1, folder=folder / "fit")
    fields = files.predictor_fields(MODEL, fit, predictors.Bits(), 4)
    files.write_sidecar(folder / "chain.gguf", fields, files.predictor_arrays(fit))
    return folder / "chain.gguf"


class Cut:
    """Contexts that are made meanwhile compute the nodes that `wants` names as graphs of their own."""

    def __init__(self, wants: Callable[[str], bool]) -> None:
        libs = loader.libraries()
        name = libs.base.ggml_op_desc
        name.restype, name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        self.seen: Counter[str] = Counter()

        def ask(node: int, asks: bool, _: int) -> bool:
            kind = name(node).decode()
            self.seen[kind] += not asks
            return not asks or wants(kind)

        self.callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)(ask)

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lib = loader.libraries().llama
        make = lib.llama_init_from_model

        def cut(model: int, params: Any) -> Any:
            params.cb_eval = ctypes.cast(self.callback, ctypes.c_void_p)
            return make(model, params)

        monkeypatch.setattr(lib, "llama_init_from_model", cut)


def outcome(cache: str, config: Path, path: Path) -> Outcome:
    """Two batches and some tokens, through a window of 32 cells and several ubatches."""
    method, opts = CACHES[cache]
    with Model(MODEL, method, opts or None, str(config), n_ctx=1024, n_batch=256, n_ubatch=128, n_threads=1) as m:
        ids = m.tokenize(TEXT, add_bos=True)[:512]
        rows = [next(iter(m.feed(ids[i : i + 256])))[-1].copy() for i in (0, 256)]
        text = "".join(m.generate("", reset=False, max_tokens=80, temperature=0))
        rows.append(next(iter(m.feed(ids[:1])))[-1].copy())
        pages = {k: v for k, v in m.kv_stats().items() if k in ("n_sealed", "n_reopened", "n_forced")}
        m.save_state(path)
    return Outcome(np.array(rows), text, pages, path.read_bytes())


whole: dict[str, Outcome] = {}


def check(
    cache: str, wants: Callable[[str], bool], data: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> set[str]:
    """Kinds of the nodes that were computed by themselves."""
    config = data if CACHES[cache][0] == "aqua" else Path("none")
    if cache not in whole:
        whole[cache] = outcome(cache, config, folder / "whole")
    with monkeypatch.context() as patch:
        cut = Cut(wants)
        cut.apply(patch)
        got = outcome(cache, config, folder / "cut")
    want = whole[cache]
    assert cut.seen.total() > 80
    assert got.pages == want.pages
    assert np.array_equal(got.logits, want.logits), np.abs(got.logits - want.logits).max(axis=1)
    assert got.text == want.text
    assert got.state == want.state
    return set(+cut.seen)


@pytest.mark.parametrize("cache", CACHES)
def test_a_callback_on_every_node_changes_nothing(
    cache: str, chain_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(cache, lambda _: True, chain_data, tmp_path, monkeypatch) == set(KINDS)


def test_a_declared_type_whose_turns_stand_in_graphs_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such turns are computed, and undone where rows, queries and the output pass by: up to rounding."""
    rows, opts = [], "bits=4"
    for cut in (False, True):
        with monkeypatch.context() as patch:
            if cut:
                Cut(lambda _: True).apply(patch)
            with Model(
                MODEL, "kivi", opts, n_ctx=1024, n_batch=256, n_ubatch=128, n_threads=1, type_k="q8_0", type_v="q8_0"
            ) as m:
                ids = m.tokenize(TEXT, add_bos=True)[:512]
                rows.append([next(iter(m.feed(ids[i : i + 256])))[-1].copy() for i in (0, 256)])
    whole_graph, cut_graph = np.array(rows[0]), np.array(rows[1])
    error = ((whole_graph - cut_graph) ** 2).sum() / (whole_graph**2).sum()
    assert 0 < error < 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", [c for c in CACHES if c not in ("upstream", "kivi-4", "kivi-pooled", "aqua")])
def test_a_callback_on_a_kind_of_nodes_changes_nothing(
    cache: str, kind: str, chain_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(cache, lambda op: op == kind, chain_data, tmp_path, monkeypatch) == {kind}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cache", [c for c in CACHES if c != "upstream"])
def test_graphs_that_are_cut_at_random(
    cache: str, seed: int, chain_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    check(cache, lambda _: chance.random() < 0.3, chain_data, tmp_path, monkeypatch)
