"""Every architecture of the built llama.cpp: what runs is held to llama.cpp's own cache, what does not is listed."""

from __future__ import annotations

from dataclasses import replace

import arch_matrix
import pytest
from arch_expected import IMAGES, NO_MODEL, REFUSED, UNTOUCHED, problem, report
from arch_matrix import METHODS, Setup
from ggml_kvq import _paths


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
    assert set(NO_MODEL) | set(UNTOUCHED) | {a.split()[0] for a in REFUSED} <= set(archs), (
        "the tables name an architecture that this llama.cpp does not know"
    )
    bad = report(rows)
    assert not bad, "\n".join(bad)


def test_images_in_the_text_of_models_with_mrope(setup: Setup) -> None:
    """Tokens whose four positions differ: un-rotated keys (aqua) are as near as of text."""
    rows = arch_matrix.run_all(replace(setup, image=True), IMAGES)
    bad = report(rows)
    assert not bad, "\n".join(bad)


TURNED = ("llama", "chatglm", "stablelm", "phi3", "gemma3", "gpt-oss", "qwen3", "olmo2")


@pytest.mark.parametrize("image", [False, True])
def test_keys_of_one_token_are_the_same_at_every_position_without_rotary_embedding(setup: Setup, image: bool) -> None:
    """What aqua quantises, of open pages: whole, partial, scaled embeddings, sliding windows, sections, images."""
    archs = [a for a in IMAGES if a != "hunyuan_vl"] if image else [*TURNED, *IMAGES[:2]]  # that one has a norm behind
    methods = ["aqua:predictor=none,window=512"]
    for row in arch_matrix.run_all(replace(setup, image=image, same=True), archs, methods):
        assert row.kind == "nmse" and row.apart[0] < 2e-3 and row.apart[1] < 2e-3, f"{row} {row.apart}"
        assert row.apart[0] > 0 and (row.apart[1] > 0) == image, f"{row} {row.apart}: nothing was compared"


def test_a_model_that_aborts_fails_its_own_row() -> None:
    output = "@reference ok 8\n@begin f16\n@end f16 nmse 1.0e-07\n@begin kivi:bits=4\n"
    output += "somewhere.cpp:941: cannot run the operation (SCALE)\n"
    rows = arch_matrix.read_rows("mamba", METHODS, output, -6)
    assert [(r.method, r.kind) for r in rows] == [("f16", "nmse"), ("kivi:bits=4", "aborted")]
    assert "cannot run the operation (SCALE)" in rows[1].reason and problem(rows[1])
    assert problem(replace(rows[0], nmse=float("nan"))) and problem(replace(rows[0], nmse=2e-4))


def test_an_unexplained_refusal_is_a_failure() -> None:
    output = (
        "@reference ok 8\n@begin f16\nllama_init_from_model: failed to allocate compute pp buffers\n@end f16 refused\n"
    )
    (row,) = arch_matrix.read_rows("new", ["f16"], output, 0)
    assert row.kind == "refused" and row.reason.startswith("unexplained")
    assert problem(row) and problem(replace(row, arch="grok"))
