"""Keys in halves of rotary pairs: which models have them, and that they are taken only where they pay."""

from __future__ import annotations

from pathlib import Path

import arch_matrix
import numpy as np
import pytest
from draft_models import random_model
from ggml_kvq import Model, _paths, default_means, gguf_header
from ggml_kvq.calibrate import capture, halves, means
from ggml_kvq.errors import KvqError

MEANS = default_means.TEXT.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> arch_matrix.Setup:
    lib = _paths.lib_dir()
    program = arch_matrix.compile_program(lib, tmp_path_factory.mktemp("program") / "arch_matrix")
    return arch_matrix.Setup(program, lib, _paths.backend())


@pytest.mark.parametrize(
    ("arch", "changes", "want"),
    [
        ("llama", {}, "norm"),
        ("qwen3", {}, "neox"),
        ("gemma3", {}, "neox"),  # two embeddings, of whole heads both
        ("glm4", {"rope.dimension_count": 32}, "none"),  # half of a head turns
        ("cohere2", {"block_count": 4, "attention.sliding_window_pattern": 4}, "none"),  # the last layer does not turn
        ("qwen2vl", {}, "none"),  # four positions a token
        ("gpt2", {}, "none"),
    ],
)
def test_which_channels_turn_together(
    setup: arch_matrix.Setup, demo_model: Path, tmp_path: Path, arch: str, changes: dict[str, int], want: str
) -> None:
    """As the graphs show it: metadata say less."""
    path = random_model(setup, demo_model, tmp_path / "m.gguf", arch, **changes)
    layers = [il for il, *_ in capture.layers(path)]
    with capture.open_model(path, 256, 2) as model:
        capture.run(model, np.arange(5, 69, dtype=np.int32))
        assert capture.pairs(model, layers) == want


def fitted(path: Path) -> means.Means:
    return means.fit(path, MEANS, n_sequences=1, length=256, shorten=True)


def test_halves_are_tried_and_kept_where_they_lose_less(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    m = halves.checked(demo_model, fitted(demo_model), MEANS)
    assert m.pairs == "norm" and 0 < 0.95 * m.losses["norm"] < min(m.losses["sorted"], 0.7 * m.losses["none"]) < 0.1
    for lost, want in (
        ({"none": 0.1, "norm": 0.2, "sorted": 0.11}, "none"),
        ({"none": 0.1, "norm": float("nan"), "sorted": float("nan")}, "none"),
        ({"none": 0.0, "norm": 0.0, "sorted": 0.0}, "none"),
        ({"none": 0.1, "norm": 0.05, "sorted": 0.048}, "norm"),
        ({"none": 0.1, "norm": 0.05, "sorted": 0.047}, "sorted"),
        ({"none": 0.1, "norm": 0.05}, "norm"),
    ):
        monkeypatch.setattr(halves, "losses", lambda *_, lost=lost: lost)
        assert halves.checked(demo_model, fitted(demo_model), MEANS).pairs == want


def test_a_model_whose_fast_pairs_matter_keeps_whole_keys(
    setup: arch_matrix.Setup, demo_model: Path, tmp_path: Path
) -> None:
    """Random weights know no pairs: half of the keys missing costs more than two bits for all."""
    path = random_model(setup, demo_model, tmp_path / "random.gguf", "llama")
    lost = halves.losses(path, fitted(path), MEANS)
    assert lost["norm"] > 1.5 * lost["none"] > 0 and lost["sorted"] > lost["none"]
    assert halves.checked(path, fitted(path), MEANS).pairs == "none"


def test_a_text_that_is_too_short_leaves_them_whole(demo_model: Path) -> None:
    assert halves.checked(demo_model, fitted(demo_model), MEANS[:600]).pairs == "none"
    with pytest.raises(KvqError, match="too short"):
        halves.losses(demo_model, fitted(demo_model), MEANS[:600])


def test_data_say_how_keys_are_split(demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_CACHE_DIR", str(tmp_path))
    sidecar, why = default_means.ensure(demo_model, lambda _: None)
    assert not why and gguf_header.read(str(sidecar)).kvq()["kvq.auto.pairs"] == "norm"
    lines = {}
    for opts in ("level=24", "level=24,pairs=none", "level=24,means=off"):
        with Model(demo_model, kv_method="auto", kv_opts=f"{opts},coordinates=off", n_ctx=1024) as model:
            lines[opts] = model.load_line
    assert "0|4-bit" in lines["level=24"] and not any("|" in lines[x].split("KiB")[0] for x in [*lines][1:])
