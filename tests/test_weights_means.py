"""Means and order of keys from the weights alone: programs that bring no measured data (gguf/weights.cpp)."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import random_models
from ggml_kvq import Model, default_means
from ggml_kvq.calibrate import files
from ggml_kvq.calibrate.means import Means
from ggml_kvq.calibrate.order import sorted_keys

TEXT = default_means.TEXT.read_text(encoding="utf-8")
N_LAYER, WIDTH, HEADS, KV, HEAD = 4, 256, 4, 2, 64


def biased(demo: Path, out: Path, arch: str, bias: float, broken: bool = False) -> Path:
    """A random model of the Qwen2 family whose keys have large biases in a few channels, as real ones have."""
    rng = np.random.default_rng(5)
    writer = gguf.GGUFWriter(str(out), arch)
    sizes = {"context_length": 4096, "embedding_length": WIDTH, "block_count": N_LAYER, "feed_forward_length": 64}
    for key, value in {**sizes, "attention.head_count": HEADS, "attention.head_count_kv": KV}.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    random_models.copy_tokenizer(writer, demo)
    shapes: random_models.Shapes = {"token_embd": (8192, WIDTH), "output_norm": (WIDTH,)}
    layer: random_models.Shapes = {"attn_q": (HEADS * HEAD, WIDTH), "attn_k": (KV * HEAD, WIDTH)}
    layer |= {"attn_v": (KV * HEAD, WIDTH), "attn_output": (WIDTH, HEADS * HEAD)}
    layer |= {"ffn_gate": (64, WIDTH), "ffn_up": (64, WIDTH), "ffn_down": (WIDTH, 64)}
    layer |= {x: (WIDTH,) for x in ("attn_norm", "ffn_norm")}
    for il in range(N_LAYER if bias else 0):
        for name, heads in (("q", HEADS), ("k", KV), ("v", KV)):
            x = 0.1 * rng.standard_normal(heads * HEAD)
            if name == "k":
                x[rng.choice(KV * HEAD, 12, replace=False)] += bias * rng.choice([-1, 1], 12)
            if broken and il == 2:
                x[3] = np.nan
            writer.add_tensor(f"blk.{il}.attn_{name}.bias", x.astype(np.float32))
    random_models.write(writer, shapes, layer, N_LAYER, 1 / 16)
    return out


@pytest.fixture(scope="module")
def model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return biased(demo_model, tmp_path_factory.mktemp("biased") / "m.gguf", "qwen2", 12.0)


def logits(path: Path, method: str, opts: str = "", config: str | Path = "none") -> tuple[np.ndarray, str]:
    with Model(path, method, opts, config, n_ctx=512, n_batch=64, n_ubatch=64, n_threads=2) as m:
        ids = m.tokenize(TEXT)[:480]
        return np.concatenate([x.copy() for x in m.feed(ids, outputs=np.arange(480) >= 240)]), m.load_line


def error(a: np.ndarray, b: np.ndarray) -> float:
    return float(((a - b) ** 2).mean() / (b**2).mean())


def test_a_bias_of_keys_is_their_mean(model: Path) -> None:
    """The library alone, 2.25 bits: a large bias costs nothing, and without it nearly everything is lost."""
    exact, _ = logits(model, "f16")
    taken, line = logits(model, "auto", "bits=2.25,at=131072")
    without, _ = logits(model, "auto", "bits=2.25,at=131072,means=off")
    assert "channel means are taken off" in line and "|" in line.partition("MiB")[0]
    assert error(taken, exact) < 0.5 * error(without, exact)
    whole, line = logits(model, "auto", "bits=2.25,at=131072,pairs=none")
    assert "|" not in line.partition("MiB")[0] and error(whole, exact) < 0.7 * error(without, exact)


def test_the_order_is_that_of_white_inputs(model: Path, tmp_path: Path) -> None:
    """A sidecar with the same means and order, made by the rule of calibrate/order.py, gives the same logits."""
    t = {x.name: np.array(x.data, np.float64) for x in gguf.GGUFReader(model).tensors}
    given = Means(pairs="sorted")
    for il in range(N_LAYER):
        name = f"blk.{il}.attn_"
        norm = t[f"{name}norm.weight"]
        keys = ((t[f"{name}k.weight"] * norm) ** 2).sum(1).reshape(KV, HEAD)
        queries = ((t[f"{name}q.weight"] * norm) ** 2).sum(1) + t[f"{name}q.bias"] ** 2
        channel, gain = sorted_keys(keys, queries.reshape(KV, HEADS // KV, HEAD).mean(1), "neox")
        given.order[il] = (channel.reshape(-1), gain.reshape(-1))
        given.mean[il] = (t[f"{name}k.bias"].astype(np.float32), t[f"{name}v.bias"].astype(np.float32))
        given.rms[il] = (0.0, 0.0)
    meta = {key: x for key, x in files.fields(model, given, 4).items() if not key.endswith(".rms")}
    files.write_sidecar(tmp_path / "same.kvq.gguf", meta, files.arrays(given))
    opts = "bits=2.25,at=131072"
    alone, of_file = logits(model, "auto", opts)[0], logits(model, "auto", opts, tmp_path / "same.kvq.gguf")[0]
    assert error(alone, of_file) < 1e-6


@pytest.mark.parametrize(("arch", "bias", "broken"), [("qwen2", 0.0, False), ("qwen2", 12.0, True)])
def test_a_model_that_says_nothing_goes_without(
    demo_model: Path, tmp_path: Path, arch: str, bias: float, broken: bool
) -> None:
    path = biased(demo_model, tmp_path / "m.gguf", arch, bias, broken)
    if broken:  # its own attention is of no use then; only that nothing is taken from it counts
        with Model(path, "auto", "bits=3,at=131072", "none", n_ctx=512, n_threads=1) as m:
            assert "channel means are taken off" not in m.load_line
    else:
        assert "channel means are taken off" not in logits(path, "auto", "bits=3,at=131072")[1]


def test_a_sidecar_has_precedence(model: Path, tmp_path: Path) -> None:
    given = Means(pairs="none", rms=dict.fromkeys(range(N_LAYER), (1.0, 1.0)))
    given.mean = {il: (np.zeros(KV * HEAD, np.float32),) * 2 for il in range(N_LAYER)}
    files.write_sidecar(tmp_path / "zero.kvq.gguf", files.fields(model, given, 4), files.arrays(given))
    line = logits(model, "auto", "bits=2.25,at=131072", tmp_path / "zero.kvq.gguf")[1]
    assert "|" not in line.partition("MiB")[0] and "channel means are taken off" in line
