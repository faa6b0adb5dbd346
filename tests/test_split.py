"""A model over two devices: whole layers on each (-sm layer), or heads of each layer (-sm tensor). On the CPU, where
KVQ_HOST_DEVICES makes two devices. Events, copies between GPUs and their sums (host/cuda/cuda_between.cpp) need GPUs.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import test_sliding_windows
from conftest import ROOT, run_until_said
from ggml_kvq import _paths, default_means
from ggml_kvq.calibrate import files, means
from test_aqua import sidecar  # noqa: F401
from test_weights_means import biased

DEMO = ROOT / "models" / "kvq-demo-q8_0.gguf"  # 12 layers of 2 KV heads
TEXT = ROOT / "tests" / "data" / "walk.txt"
PROMPT = ROOT / "examples" / "prompt.txt"  # 346 tokens
ONE, LAYERS, HEADS = ["-dev", "KVQ0"], ["-dev", "KVQ0,KVQ1", "-sm", "layer"], ["-dev", "KVQ0,KVQ1", "-sm", "tensor"]


def start(
    program: str, model: Path, method: str, *args: str, options: str = "", said: str = ""
) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "GGML_BACKEND_PATH": str(_paths.backend()),
        "KVQ_HOST_DEVICES": "3",
        "KVQ_METHOD": method,
        "KVQ_OPTS": options,
        "KVQ_MODEL": str(model),
        "GGML_NO_BACKTRACE": "1",
    }
    argv = [str(_paths.program(program)), "-m", str(model), "-fa", "on", "-t", "1", *args]
    return run_until_said(said, argv, env=env, timeout=120)


def perplexity(method: str, *devices: str, options: str = "", model: Path = DEMO) -> float:
    text = ["-f", str(TEXT), "-c", "512", "--chunks", "2", "-ub", "128"]
    done = start("llama-perplexity", model, method, *text, *devices, options=options, said="PPL = ")
    found = re.search(r"PPL = ([\d.]+)", done.stdout + done.stderr)
    assert done.returncode == 0 and found, done.stderr[-2000:]
    found_on = set(re.findall(r"^ggml-kvq: .* device (KVQ\d)", done.stderr, re.MULTILINE))
    assert found_on == set(devices[devices.index("-dev") + 1].split(","))
    return float(found[1])


@pytest.mark.parametrize("method", ["kivi", "higgs", "zipcache", "minikv", "specache", "auto"])
def test_layers_on_two_devices_are_those_of_one(method: str) -> None:
    assert perplexity(method, *LAYERS) == perplexity(method, *ONE)


@pytest.mark.parametrize("method", ["f16", "kivi", "higgs", "zipcache", "minikv", "specache", "auto", "xquant"])
def test_heads_on_two_devices(method: str) -> None:
    """Sums of both devices are added in another order, and evicting methods choose by head already."""
    near = 0.1 if method == "xquant" else 0.02
    assert perplexity(method, *HEADS) == pytest.approx(perplexity(method, *ONE), rel=near)


@pytest.mark.parametrize(("method", "options"), [("f16", ""), ("kivi", ""), ("auto", "bits=3.5")])
def test_layers_with_windows(tmp_path: Path, method: str, options: str) -> None:
    """Two caches, each of which has its own layers."""
    model = test_sliding_windows.gemma3(DEMO, tmp_path / "windows.gguf", 3)
    one, two = (perplexity(method, *devices, options=options, model=model) for devices in (ONE, HEADS))
    assert two == pytest.approx(one, rel=0.01)


@pytest.mark.parametrize("method", ["kivi", "minikv", "auto"])
def test_a_device_without_heads_of_a_layer(method: str) -> None:
    """Three devices share two heads, another two of them in each layer: the size of no channels was divided by."""
    three = ["-dev", "KVQ0,KVQ1,KVQ2", "-sm", "tensor"]
    assert perplexity(method, *three) == pytest.approx(perplexity(method, *ONE), rel=0.02)


def test_devices_of_unequal_shares() -> None:
    assert perplexity("kivi", *HEADS, "-ts", "3,1") == pytest.approx(perplexity("kivi", *ONE), rel=0.02)


def test_each_device_takes_the_means_of_its_heads(tmp_path: Path) -> None:
    """Keys have a large bias that differs from head to head: the other head's means give four times the divergence."""
    twin, base = biased(DEMO, tmp_path / "twin.gguf", "qwen2", 20.0), str(tmp_path / "base")
    text = ["-f", str(TEXT), "-c", "512", "--chunks", "2", "-ub", "128", "--kl-divergence-base", base]
    assert start("llama-perplexity", twin, "f16", *text, *ONE).returncode == 0

    def divergence(devices: list[str]) -> float:
        args, said = [*text, "--kl-divergence", *devices], r"Mean\s+KLD:\s+([\d.]+)"
        done = start("llama-perplexity", twin, "auto", *args, options="bits=2.25", said=said)
        found = re.search(said, done.stdout + done.stderr)
        assert found, done.stderr[-2000:]
        return float(found[1])

    assert divergence(HEADS) < 1.5 * divergence(ONE)


def text_of(method: str, file: Path, *devices: str) -> tuple[str, str]:
    """The text behind the prompt, and what llama.cpp says of the file."""
    prompt = ["-f", str(PROMPT), "-c", "1024", "-n", "16", "--temp", "0", "-no-cnv", "--no-warmup"]
    for _ in range(6):  # its log thread drops the end of a text when the process ends on a busy machine
        done = start("llama-completion", DEMO, method, *prompt, *devices, "--prompt-cache", str(file))
        if done.returncode or done.stdout.endswith("\n\n"):
            break
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, done.stderr


@pytest.mark.parametrize("method", ["kivi", "higgs", "minikv", "specache", "auto"])
@pytest.mark.parametrize("devices", [LAYERS, HEADS], ids=["layers", "heads"])
def test_a_state_of_one_device_on_two_and_back(tmp_path: Path, method: str, devices: list[str]) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    text, _ = text_of(method, first, *ONE)
    again, said = text_of(method, first, *devices)
    assert "exact match for prompt" in said and "error" not in said
    two, _ = text_of(method, second, *devices)
    assert text_of(method, second, *devices)[0] == two
    back, said = text_of(method, second, *ONE)
    assert "exact match for prompt" in said and "error" not in said
    if method in ("kivi", "higgs", "specache"):  # others give devices other bits or cells
        assert again == text and back == two


def test_a_predictor_needs_whole_layers(sidecar: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("KVQ_CONFIG", str(sidecar))
    prompt = ["-p", "hi", "-n", "1", "-no-cnv"]
    done = start("llama-completion", DEMO, "aqua", *prompt, *HEADS, options="predictor=k")
    assert done.returncode and "run with -sm layer, or predictor=bias" in done.stderr
    assert start("llama-completion", DEMO, "aqua", *prompt, *HEADS, options="predictor=bias").returncode == 0


@pytest.fixture(scope="module")
def coords_sidecar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = default_means.TEXT.read_text(encoding="utf-8")
    fitted = means.fit(DEMO, text, n_sequences=1, length=1024, shorten=True, coords=12)
    fitted.pairs = "sorted"
    out = tmp_path_factory.mktemp("coords") / "coords.kvq.gguf"
    files.write_sidecar(out, files.fields(DEMO, fitted, 4), files.arrays(fitted))
    return out


def test_coordinates_of_the_data_give_way_to_heads_on_several_devices(
    coords_sidecar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take whole layers. What the user asks for by name is refused."""
    monkeypatch.setenv("KVQ_CONFIG", str(coords_sidecar))
    prompt = ["-p", "hi", "-n", "1", "-no-cnv"]
    for devices, has in ((ONE, True), (HEADS, False)):
        done = start("llama-completion", DEMO, "auto", *prompt, *devices, options="bits=2.5")
        assert done.returncode == 0 and ("coordinates a head say" in done.stderr) == has, done.stderr[-2000:]
    done = start("llama-completion", DEMO, "auto", *prompt, *HEADS, options="bits=2.5,coordinates=on")
    assert done.returncode and "coordinates take whole layers" in done.stderr
    done = start("llama-completion", DEMO, "auto", *prompt, *ONE, options="bits=2.5,coordinates=off")
    assert done.returncode == 0 and "coordinates a head" not in done.stderr
