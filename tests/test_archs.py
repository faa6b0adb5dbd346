"""Every architecture of the built llama.cpp with our cache: what runs is held to llama.cpp's own cache, what does not is listed with the reason.

An architecture that is in neither way accounted for fails, so that a newer llama.cpp cannot bring one unseen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import arch_matrix
import pytest
from arch_matrix import METHODS, Row, Setup
from ggml_kvq import _paths

# NMSE of the logits of 400 tokens. Models of random weights have no outliers to lose; what the bounds tell apart is a cache that is read
# wrongly (NMSE near 1) or at fewer bits (a bit less is a factor of 4).
LIMITS = dict(zip(METHODS, (1e-4, 5e-3, 1e-2, 5e-3)))

# Attention of these is sharper than of others, which shows what quantisation changes: ten times the bounds, but for f16.
SHARP = {
    "gemma4": "queries are not scaled: logits are 8 times as large",
    "graniteswitch": "a layer that routes between adapters turns small changes into large ones",
}

# llama.cpp itself does not run these models: part of the reason that it gives.
NO_MODEL = {
    "clip": "CLIP cannot be used as main model",
    "gptj": "unsupported model architecture: 'gptj'",
    "plm": "GGML_ASSERT(a->ne[0] == b->ne[0])",  # its values have no heads when they are stored
    "rwkv6qwen2": "exit code -11",  # its graph takes the presence of an optional tensor for another architecture
    "wavtokenizer-dec": "wavtokenizer-dec.features_length",  # a vocoder, which keeps no cache
    "eagle3": "EAGLE3 model requires",  # drafts for another model, in whose context they run
    "dflash": "DFlash model requires",
    "gemma4-assistant": "GGML_ASSERT(buft != nullptr)",
}

# Refused, with a line of ours; with a method: by this one alone.
LATENT = ["deepseek2", "deepseek32", "glm-dsa", "bailingmoe3", "dots3note", "hy_v4", "mistral4", "kimi-linear", "kimi-k3", "glm5-next"]
REFUSED = {
    **{f"{arch} aqua": "multi-head latent attention, which method aqua cannot hold" for arch in LATENT},
    "deepseek4": "keeps keys without values",  # compressed keys that are read as values in a way of their own
    "minimax-m3": "without flash attention (rows of the cells that an indexer picks are gathered)",
    "grok": "without flash attention (its attention logits go through tanh)",
    "t5": "without flash attention (its attention logits have a bias",
}

# Models with M-RoPE in whose text an image can be.
IMAGES = ("qwen2vl", "qwen3vl", "qwen3vlmoe", "glm4", "glm4moe", "hunyuan_vl", "paddleocr")


def problem(row: Row, refused: dict[str, str], limits: dict[str, float]) -> str:
    """What is not as it should be; "" when nothing is."""
    expected = NO_MODEL.get(row.arch)
    if expected is not None:
        alone = row.kind == "failed" and row.reason.startswith("llama.cpp alone: ") and expected in row.reason
        return "" if alone else f"is listed as: llama.cpp alone fails with {expected!r}"
    expected = refused.get(f"{row.arch} {row.method.split(':')[0]}", refused.get(row.arch))
    if expected is not None:
        return "" if row.kind == "refused" and expected in row.reason else f"is listed as: refused with {expected!r}"
    if row.kind != "nmse":
        return "is neither run nor listed"
    limit = limits[row.method] * (10 if row.arch in SHARP and row.method != "f16" else 1)
    return "" if row.nmse <= limit else f"is above {limit:g}"


def report(rows: Sequence[Row], refused: dict[str, str], limits: dict[str, float]) -> list[str]:
    """Prints the table and its worst rows; returns the rows that are not as they should be."""
    for method in limits:
        run = [r for r in rows if r.method == method and r.kind == "nmse"]
        worst = max(run, key=lambda r: r.nmse)
        print(f"{method:<28} {len(run)} architectures, worst {worst.arch} {worst.nmse:.2e}")
    bad = [f"{row}   <- {why}" for row in rows if (why := problem(row, refused, limits))]
    print("\n".join(bad))
    return bad


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    lib = _paths.lib_dir()
    program = arch_matrix.compile_program(lib, tmp_path_factory.mktemp("archs") / "arch_matrix")
    return Setup(program, lib, _paths.backend())


def test_every_architecture_runs_or_is_listed_with_its_reason(setup: Setup) -> None:
    archs = arch_matrix.architectures(setup)
    assert len(archs) > 100 and "llama" in archs, archs
    rows = arch_matrix.run_all(setup, archs)
    assert {(r.arch, r.method) for r in rows} == {(a, m) for a in archs for m in METHODS}
    assert set(NO_MODEL) | {a.split()[0] for a in REFUSED} <= set(archs), "the tables name an architecture that this llama.cpp does not know"
    bad = report(rows, REFUSED, LIMITS)
    assert not bad, "\n".join(bad)


def test_images_in_the_text_of_models_with_mrope(setup: Setup) -> None:
    """Tokens whose four positions differ: un-rotated keys (aqua) are as near as of text."""
    rows = arch_matrix.run_all(replace(setup, image=True), IMAGES)
    bad = report(rows, REFUSED, LIMITS)
    assert not bad, "\n".join(bad)


def test_a_model_that_aborts_fails_its_own_row() -> None:
    output = "@reference ok 8\n@begin f16\n@end f16 nmse 1.0e-07\n@begin kivi:bits=4\nsomewhere.cpp:941: cannot run the operation (SCALE)\n"
    rows = arch_matrix.read_rows("mamba", METHODS, output, -6)
    assert [(r.method, r.kind) for r in rows] == [("f16", "nmse"), ("kivi:bits=4", "aborted")]
    assert "cannot run the operation (SCALE)" in rows[1].reason and problem(rows[1], {}, LIMITS)
    assert problem(replace(rows[0], nmse=float("nan")), {}, LIMITS) and problem(replace(rows[0], nmse=2e-4), {}, LIMITS)


def test_an_unexplained_refusal_is_a_failure() -> None:
    output = "@reference ok 8\n@begin f16\nllama_init_from_model: failed to allocate compute pp buffers\n@end f16 refused\n"
    (row,) = arch_matrix.read_rows("new", ["f16"], output, 0)
    assert row.kind == "refused" and row.reason.startswith("unexplained")
    assert problem(row, REFUSED, LIMITS) and problem(replace(row, arch="grok"), REFUSED, LIMITS)
