"""Tensors that llama.cpp keeps from one graph to the next and that are no cache: gradients and momenta of training, and
control vectors. They came into our buffer, and the scheduler ended the process at the first operation on one.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from conftest import is_one_text, run_python
from ggml_kvq import Model

METHODS = ["f16", "kivi", "xquant", "minikv"]

# Trains output_norm for two epochs; prints the losses and the logits behind them.
TRAIN = """
import ctypes, json, sys
from ctypes import c_bool, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
import gguf
import numpy as np
from ggml_kvq import Model
from ggml_kvq.core import loader

path, method, optimizer = sys.argv[1], sys.argv[2], int(sys.argv[3])
libs = loader.libraries()
lib, base = libs.llama, libs.base
load = lib.llama_model_load_from_file

def without_mmap(name, params):
    params.load_mode = 0  # weights are written
    return load(name, params)

lib.llama_model_load_from_file = without_mmap
FILTER = ctypes.CFUNCTYPE(c_bool, c_void_p, c_void_p)

class llama_opt_params(ctypes.Structure):
    _fields_ = [("n_ctx_train", c_uint32), ("filter", FILTER), ("filter_ud", c_void_p), ("pars", c_void_p),
                ("pars_ud", c_void_p), ("optimizer", c_int)]

for owner, name, result, args in [
    (base, "ggml_get_name", c_char_p, [c_void_p]),
    (base, "ggml_get_data", c_void_p, [c_void_p]),
    (base, "ggml_opt_dataset_init", c_void_p, [c_int, c_int, c_int64, c_int64, c_int64, c_int64]),
    (base, "ggml_opt_dataset_data", c_void_p, [c_void_p]),
    (base, "ggml_opt_dataset_labels", c_void_p, [c_void_p]),
    (base, "ggml_opt_result_init", c_void_p, []),
    (base, "ggml_opt_result_loss", None, [c_void_p, ctypes.POINTER(c_double), c_void_p]),
    (lib, "llama_opt_init", None, [c_void_p, c_void_p, llama_opt_params]),
    (lib, "llama_opt_epoch", None, [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p]),
]:
    getattr(owner, name).restype, getattr(owner, name).argtypes = result, args

wanted = FILTER(lambda t, _: base.ggml_get_name(t) == b"output_norm.weight")
with Model(path, method, n_ctx=256, n_batch=256, n_ubatch=256, n_threads=2) as m:
    n, n_data = m.n_ctx, 2
    ids = m.tokenize("The file is read by the program. " * 200, add_bos=True) * 4
    ids = np.array(ids[: n * n_data + 1], np.int32)
    I32 = 26
    data = base.ggml_opt_dataset_init(I32, I32, n, n, n_data, 1)
    for of, first in ((base.ggml_opt_dataset_data, 0), (base.ggml_opt_dataset_labels, 1)):
        at = ctypes.cast(base.ggml_get_data(of(data)), ctypes.POINTER(c_int32))
        np.ctypeslib.as_array(at, (n * n_data,))[:] = ids[first : first + n * n_data]
    defaults = ctypes.cast(base.ggml_opt_get_default_optimizer_params, c_void_p)
    lib.llama_opt_init(m._ctx, m._model, llama_opt_params(0, wanted, None, defaults, None, optimizer))
    losses = []
    for _ in range(2):
        result, loss = base.ggml_opt_result_init(), c_double()
        lib.llama_opt_epoch(m._ctx, data, result, base.ggml_opt_result_init(), n_data, None, None)
        base.ggml_opt_result_loss(result, ctypes.byref(loss), None)
        losses.append(loss.value)
print(json.dumps(losses))
"""


@pytest.mark.parametrize("optimizer", [0, 1])
def test_a_model_trains_as_without_us(optimizer: int, demo_model: Path) -> None:
    """AdamW keeps two tensors a weight, SGD none; the graph reads keys and values where they were made."""
    losses = {}
    for method in ["upstream", *METHODS]:
        done = run_python(TRAIN, str(demo_model), method, str(optimizer))
        assert done.returncode == 0, f"{method}: {done.stderr[-2000:]}"
        losses[method] = json.loads(done.stdout.splitlines()[-1])
    first, second = losses["upstream"]
    assert second < first if optimizer == 0 else second != first
    for method in METHODS:
        assert losses[method] == pytest.approx(losses["upstream"], rel=1e-6), losses


@pytest.mark.parametrize("method", METHODS)
def test_a_control_vector_does_what_it_does_without_us(method: str, demo_model: Path) -> None:
    out = {}
    for name in ("upstream", method):
        with Model(demo_model, name, n_ctx=512, n_threads=1) as m:
            lib = m._libs.llama
            apply = lib.llama_set_adapter_cvec
            apply.restype, apply.argtypes = (
                ctypes.c_int32,
                [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int32] * 3],
            )
            ids = m.tokenize("The file is read by the program.", add_bos=True)
            plain = m.logits(ids)
            lib.llama_model_n_embd.restype = ctypes.c_int32
            n = lib.llama_model_n_embd(m._model)
            vector = np.random.default_rng(0).normal(size=n * (m.n_layer - 1)).astype(np.float32)
            assert apply(m._ctx, vector.ctypes.data, vector.size, n, 1, m.n_layer) == 0
            out[name] = plain, m.logits(ids)
    for mine, theirs in zip(out[method], out["upstream"], strict=True):
        assert np.square(mine - theirs).mean() / np.square(theirs).mean() < 1e-4
    assert np.square(out[method][1] - out[method][0]).mean() / np.square(out[method][0]).mean() > 0.01


def lora(model: Path, out: Path) -> Path:
    """An adapter of rank 4 for queries, keys and values of every layer, with weights drawn by chance."""
    rank, draw = 4, np.random.default_rng(0)
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for t in gguf.GGUFReader(model).tensors:
        if any(f"attn_{x}.weight" in t.name for x in "qkv"):
            n_in, n_out = (int(n) for n in t.shape[:2])
            for name, shape in (("lora_a", (rank, n_in)), ("lora_b", (n_out, rank))):
                writer.add_tensor(f"{t.name}.{name}", 0.05 * draw.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_does_what_it_does_without_us(method: str, demo_model: Path, tmp_path: Path) -> None:
    """LoRA: its weights stay from graph to graph; half of it, and none again, give other logits each."""
    path, out = lora(demo_model, tmp_path / "lora.gguf"), {}
    for name in ("upstream", method):
        with Model(demo_model, name, n_ctx=512, n_threads=1) as m:
            lib = m._libs.llama
            lib.llama_adapter_lora_init.restype = ctypes.c_void_p
            lib.llama_adapter_lora_init.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
            lib.llama_set_adapters_lora.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
            adapter = lib.llama_adapter_lora_init(m._model, str(path).encode())
            assert adapter
            ids, found = m.tokenize("The file is read by the program.", add_bos=True), []
            for scale in (0.0, 1.0, 0.5, 0.0):
                given = (ctypes.c_void_p * 1)(adapter), (ctypes.c_float * 1)(scale)
                assert lib.llama_set_adapters_lora(m._ctx, given[0], int(scale > 0), given[1]) == 0
                found.append(m.logits(ids))
            out[name] = found
    for mine, theirs in zip(out[method], out["upstream"], strict=True):
        assert np.square(mine - theirs).mean() / np.square(theirs).mean() < 1e-4
    plain, whole, half, again = out[method]
    assert np.array_equal(plain, again)
    assert min(np.square(x - y).mean() for x, y in ((plain, whole), (whole, half), (plain, half))) > 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_a_sampler_in_the_graph_does_what_it_does_without_us(method: str, demo_model: Path) -> None:
    """llama.cpp's -bs samples in the graph: random numbers, candidates and the chosen token are tensors that stay."""
    code = "import sys; from ggml_kvq.launch import launcher; sys.exit(launcher.llama_completion())"
    argv = ["-m", str(demo_model), "-p", "The file is read by", "-n", "12", "-c", "256", "-no-cnv", "-t", "1"]
    texts = {}
    for name in ("none", method):
        for way in ([], ["-bs"]):
            done = run_python(code, *argv, *way, "--temp", "0", "--kv-method", name)
            assert done.returncode == 0, f"{name}: {done.stderr[-2000:]}"
            texts[name, len(way)] = done.stdout.strip()
        assert len(texts[name, 0]) > 30 and is_one_text(texts[name, 0], texts[name, 1]), texts
    drawn = ["-bs", "--temp", "0.8", "--top-k", "8", "--seed", "3", "--samplers", "top_k;temperature"]
    first, second = (run_python(code, *argv, *drawn, "--kv-method", method).stdout.strip() for _ in range(2))
    assert len(first) > 30 and is_one_text(first, second)
