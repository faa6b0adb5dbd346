"""state=compact and state=packed: blocks go out as they are and come back as they were, whoever reads them, or are
refused.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from ggml_kvq import Model, errors
from ggml_kvq.core import state_files, states

DEMO = ROOT / "models" / "kvq-demo-q8_0.gguf"
TEXT = "The register file holds sixteen words. Each word is read by the decoder before the next cycle begins. " * 24
N = 420
CASES = {
    "kivi": ("kivi", ""),
    "kivi4": ("kivi", "bits=4,group=64,scales=u8,sinks=4"),
    "xquant": ("xquant", ""),
    "higgs": ("higgs", ""),
    "aqua": ("aqua", "predictor=none"),
    "zipcache": ("zipcache", ""),
}


class Models:
    def __init__(self) -> None:
        self.open: dict[tuple[str, str], Model] = {}

    def __call__(self, case: str, form: str) -> Model:
        if (case, form) not in self.open:
            method, opts = CASES[case]
            text = ",".join(x for x in (opts, f"state={form}") if x)
            self.open[case, form] = Model(DEMO, method, text, n_ctx=1024, n_batch=512, n_ubatch=128, n_threads=1)
        return self.open[case, form]


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    made = Models()
    yield made
    for m in made.open.values():
        m.close()


def filled(m: Model) -> Model:
    m.reset()
    for _ in m.feed(m.tokenize(TEXT, add_bos=True)[:N]):
        pass
    return m


def rows(m: Model) -> np.ndarray:
    """The state with f16 rows, whatever the model's option: what is in the cache."""
    ids = m.tokenize("In the beginning")
    return np.array([x.copy() for x in m.feed(ids, outputs=np.ones(len(ids)), n_ubatch=1)])


@pytest.mark.parametrize("form", ["compact", "packed"])
@pytest.mark.parametrize("case", CASES)
def test_blocks_come_back_as_they_were(models: Models, case: str, form: str, tmp_path: Path) -> None:
    m = filled(models(case, form))
    m.save_state(tmp_path / "s")
    data, held = (tmp_path / "s").read_bytes(), m.tokens
    assert len(data) < 0.65 * N * 6144  # of f16 rows; the window of 128 tokens and the open page are f16
    want = rows(m)
    assert m.load_state(tmp_path / "s") == N and m.tokens == held
    m.save_state(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == data
    assert (rows(m) == want).all()
    other = models(case, "rows")  # reads them too, and holds the same
    assert other.load_state(tmp_path / "s") == N and (rows(other) == want).all()


def test_sealed_tokens_take_less_than_a_third_of_their_rows(models: Models, tmp_path: Path) -> None:
    sizes = []
    for n in (400, 912):
        m = models("kivi", "compact")
        m.reset()
        for _ in m.feed((m.tokenize(TEXT * 2, add_bos=True))[:n]):
            pass
        m.save_state(tmp_path / "s")
        sizes.append((tmp_path / "s").stat().st_size)
    each = (sizes[1] - sizes[0]) / 512
    assert each < 1300, each  # 6144 with f16 rows; 3 bits of 3072 values are 1152 bytes


@pytest.mark.parametrize("form", ["compact", "packed"])
def test_damaged_files_are_refused(models: Models, form: str, tmp_path: Path) -> None:
    m, path, rng = filled(models("kivi", form)), tmp_path / "s", random.Random(4)
    m.save_state(path)
    data = path.read_bytes()
    for i in range(24):
        bad = bytearray(data)
        for _ in range(2000 if i < 12 else 1):
            bad[rng.randrange(len(bad))] ^= rng.randrange(1, 256)
        path.write_bytes(bad)
        with pytest.raises(errors.StateError):
            m.load_state(path)
    for n in (3, 20, 32, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:n])
        with pytest.raises(errors.StateError):
            m.load_state(path)
    path.write_bytes(data)
    assert m.load_state(path) == N


@pytest.mark.parametrize(("first", "second"), [("kivi", "higgs"), ("xquant", "kivi4"), ("higgs", "aqua")])
def test_under_another_method_blocks_become_rows(models: Models, first: str, second: str, tmp_path: Path) -> None:
    a, b = filled(models(first, "compact")), models(second, "rows")
    a.save_state(tmp_path / "s")
    assert b.load_state(tmp_path / "s") == N
    got = rows(b)
    models(first, "rows").load_state(tmp_path / "s")
    want = rows(models(first, "rows"))
    b.reset()
    without = rows(b)

    def alike(logits: np.ndarray) -> float:
        return min(float(np.corrcoef(x, y)[0, 1]) for x, y in zip(logits, want))

    assert alike(got) > 0.9 > alike(without), (alike(got), alike(without))


def test_blocks_that_are_known_in_their_own_place_only_are_refused_elsewhere(models: Models, tmp_path: Path) -> None:
    a, b = filled(models("aqua", "compact")), models("kivi", "rows")
    a.save_state(tmp_path / "s")
    with pytest.raises(errors.StateError, match="state=rows"):
        b.load_state(tmp_path / "s")
    assert "".join(b.generate("The", max_tokens=4))


def test_every_byte_of_a_compact_tensor_counts_in_llama_cpps_own_format(models: Models, tmp_path: Path) -> None:
    """As llama.cpp's programs write it: the state with its zeros."""
    m = filled(models("kivi", "compact"))
    data, ids = states._state_data(m), np.array(m.tokens, np.int32)
    pieces, rng = state_files._pieces(data), random.Random(2)
    assert len(data) > 2 * sum(b - a for a, b in pieces)
    for _ in range(20):
        a, b = rng.choice([p for p in pieces[1:] if p[1] - p[0] > 100])
        at = rng.randrange(a, b)
        if data[at] == 0 and not any(data[at : at + 4096]):
            continue
        data[at] ^= 4
        state_files.write(tmp_path / "s", ids, data, False)  # with a good checksum of the file
        data[at] ^= 4
        try:
            m.load_state(tmp_path / "s")
        except errors.StateError as e:
            assert "damaged" in str(e) or "fit" in str(e)
        else:
            assert not any(a <= at < a + 64 for a, _ in pieces), at


def test_a_file_of_blocks_needs_its_method_and_room(demo_model: Path, tmp_path: Path) -> None:
    """llama.cpp's own cache took blocks for rows and went on in garbage; a context that is too short said nothing."""
    file = tmp_path / "state"
    with Model(demo_model, "kivi", "state=compact", n_ctx=512, n_threads=2) as m:
        list(m.feed(list(range(300, 640))))
        m.save_state(file)
    for method, opts, n_ctx, words in (
        ("none", None, 512, "pass the kv_method"),
        ("kivi", "state=compact", 256, "holds 340 tokens, and n_ctx is 256"),
    ):
        with (
            Model(demo_model, method, opts, n_ctx=n_ctx, n_threads=2) as m,
            pytest.raises(errors.StateError, match=words),
        ):
            m.load_state(file)
