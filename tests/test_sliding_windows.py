"""Models of which some layers see a window: llama.cpp keeps these in a cache of their own, and what is planned is what
is allocated.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import random_models
from conftest import LLAMA_FIELDS
from ggml_kvq import Model, gguf_header, info, memory, plotting
from ggml_kvq.errors import BudgetError
from ggml_kvq.evaluate import specs
from ggml_kvq.launch import launcher

N_LAYER, WIDTH, HEADS, HEAD = 7, 64, 2, 32
PATTERNS: dict[str, Any] = {"none": None, "period": 3, "array": [True, False, True, True, True, False, True]}
WHOLE = {"none": {5}, "period": {2, 5}, "array": {1, 5}}


def gemma3(demo: Path, out: Path, pattern: Any) -> Path:
    """A random model of seven layers; pattern None: llama.cpp's own, five of six layers."""
    writer = gguf.GGUFWriter(str(out), "gemma3")
    sizes = {"context_length": 4096, "embedding_length": WIDTH, "block_count": N_LAYER, "feed_forward_length": 64}
    heads = {"head_count": HEADS, "head_count_kv": HEADS, "key_length": HEAD, "value_length": HEAD}
    heads["sliding_window"] = 192
    for key, value in {**sizes, **{f"attention.{key}": value for key, value in heads.items()}}.items():
        writer.add_uint32(f"gemma3.{key}", value)
    writer.add_float32("gemma3.attention.layer_norm_rms_epsilon", 1e-5)
    name = "gemma3.attention.sliding_window_pattern"
    if isinstance(pattern, list):
        writer.add_array(name, pattern)
    elif pattern:
        writer.add_uint32(name, pattern)
    random_models.copy_tokenizer(writer, demo)
    shapes: random_models.Shapes = {"token_embd": (8192, WIDTH), "output_norm": (WIDTH,)}
    layer: random_models.Shapes = {f"attn_{x}": (HEADS * HEAD, WIDTH) for x in "qkv"}
    layer |= {"attn_output": (WIDTH, HEADS * HEAD), "attn_q_norm": (HEAD,), "attn_k_norm": (HEAD,)}
    layer |= {"ffn_gate": (64, WIDTH), "ffn_up": (64, WIDTH), "ffn_down": (WIDTH, 64)}
    layer |= {x: (WIDTH,) for x in ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")}
    random_models.write(writer, shapes, layer, N_LAYER, 1 / 8)
    return out


@pytest.fixture(scope="module", params=list(PATTERNS))
def model(request: pytest.FixtureRequest, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return gemma3(demo_model, folder / f"{request.param}.gguf", PATTERNS[request.param])


CACHES = [
    "kivi",
    "xquant",
    "xquant:preset=1.16",
    "higgs",
    "minikv:budget=pyramid",
    "aqua:predictor=none",
    "auto:means=off",
]


@pytest.mark.parametrize("text", CACHES)
def test_info_says_what_is_allocated(model: Path, text: str) -> None:
    """Layers of both caches were planned as neighbours: pairs of xquant, and the depth of a layer, were others."""
    spec = specs.parse(text)
    header = gguf_header.read(model, tensors=True)
    (plan,) = info.plans(header, 1024, [spec])
    assert not plan.refused
    with Model(model, spec.method, spec.options, n_ctx=1024, n_threads=1) as m:
        got = m.kv_stats()
    n_whole = len(WHOLE[model.stem])
    assert sorted(c["n_layer"] for c in got["caches"]) == sorted((n_whole, N_LAYER - n_whole))
    assert (plan.bytes_total, plan.bytes_f16) == (got["bytes_total"], got["bytes_f16"])
    assert (plan.bits, plan.bits_k, plan.bits_v) == pytest.approx((got["bits"], got["bits_k"], got["bits_v"]))
    row = plotting.memory_rows(model, [spec], [1024])[0]
    assert (row["bytes_total"], row["bits"]) == (plan.bytes_total, plan.bits)


def test_a_budget_holds(model: Path) -> None:
    """Model keeps layers with a window whole, and the budget counted the window: 1123 KiB of 500."""
    for size in (300, 450, 500, 550):
        try:
            with Model(model, kv_budget=f"{size}K", n_ctx=1024, n_threads=1, n_ubatch=64) as m:
                assert m.kv_stats()["bytes_total"] <= size * 1024
        except BudgetError as e:
            assert size == 300, e


def test_info_tells_of_windows(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ggml_kvq import cli

    assert cli.main(["info", str(model), "-c", "1k"]) == 0
    assert f"{N_LAYER - len(WHOLE[model.stem])} of 7 layers see a window of 192 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arch", "fields", "n_layer", "whole"),
    [
        ("gemma3", {"sliding_window": 512}, 12, {5, 11}),
        ("gemma3", {}, 12, set(range(12))),
        ("gemma2", {}, 4, {1, 3}),
        ("gpt-oss", {"sliding_window": 128}, 4, {1, 3}),
        ("gpt-oss", {"sliding_window": 128, "sliding_window_pattern": 4}, 4, {3}),
        ("cohere2moe", {"sliding_window": 128}, 8, {0, 4}),
        ("llama4", {}, 8, {3, 7}),
        ("llama4", {"sliding_window": 0}, 8, set(range(8))),
        ("phi3", {"sliding_window": 2047}, 4, {0, 1, 2, 3}),  # llama.cpp reads it and uses none
        ("exaone4", {"sliding_window": 4096}, 4, {0, 1, 2, 3}),  # only of 64 layers
        ("lfm2", {"sliding_window": 128}, 4, set()),
        ("qwen9", {"sliding_window": 128}, 12, {5, 11}),  # not known: one of six, as few as any keeps whole
        ("qwen9", {"sliding_window": 128, "sliding_window_pattern": [1, 0, 0, 1]}, 4, {1, 2}),
    ],
)
def test_which_layers_see_a_window(
    arch: str, fields: dict[str, Any], n_layer: int, whole: set[int], write_gguf: Callable[..., Path]
) -> None:
    held = {key.replace("llama", arch): value for key, value in LLAMA_FIELDS.items()}
    held |= {"general.architecture": arch, f"{arch}.block_count": n_layer}
    facts = memory.model(write_gguf("m.gguf", {**held, **{f"{arch}.attention.{k}": v for k, v in fields.items()}}))
    assert facts and {s[0] for s in facts.full} == whole and len(facts.full) + len(facts.windowed) == n_layer


def test_whole_windows_are_counted_in_full(model: Path) -> None:
    """--swa-full put the layers of both caches into one list, one cache behind the other."""
    facts = memory.model(model)
    assert facts
    plan = memory.planner("xquant", "", facts.n_layer)
    with Model(model, "xquant", n_ctx=2048, n_threads=1) as m:
        assert memory.need(memory.with_whole_windows(facts), plan, 2048).cache == m.kv_stats()["bytes_total"]
    argv = ["-m", str(model), "--kv-budget", "700K", "-c", "2048", "-ub", "64"]
    bits = {}
    for name, more, env in (("window", [], {}), ("flag", ["--swa-full"], {}), ("env", [], {"LLAMA_ARG_SWA_FULL": "1"})):
        bits[name] = launcher.command("llama-completion", [*argv, *more], env).env["KVQ_OPTS"]
    assert bits["flag"] == bits["env"] != bits["window"]


def test_layers_with_a_window_take_more_bits_where_that_costs_little(model: Path) -> None:
    """Up to a twentieth of a bit of the model's average, at the context that the bits were asked for."""
    bits = {}
    for at in (16384, 65536, 1_000_000):
        how: dict[str, Any] = {"n_ctx": 2048, "n_batch": 64, "n_ubatch": 64, "n_threads": 1, "swa_full": False}
        with Model(model, kv_method="auto", kv_opts=f"bits=2.25,at={at},means=off", kv_config="none", **how) as m:
            bits[at] = [float(x) for x in re.findall(r"V ([0-9.]+) bits", m.load_line)]
    whole, windowed = zip(*bits.values())
    assert max(whole) - min(whole) < 0.3
    assert windowed[0] <= windowed[1] <= windowed[2] and windowed[2] - windowed[0] > 1


def test_with_swa_full_no_layer_takes_more(model: Path) -> None:
    opts = "bits=2.25,at=16384,means=off"
    how: dict[str, Any] = {"n_ctx": 8192, "n_batch": 64, "n_ubatch": 64, "n_threads": 1}
    with Model(model, kv_method="auto", kv_opts=opts, kv_config="none", **how) as m:
        assert "4-bit" not in m.load_line
