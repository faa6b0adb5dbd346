"""Calibrated data that is damaged, out of range or of another model is refused; another fine-tune and an older file
are noted.
"""

from __future__ import annotations

import random
import re
import resource
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from ggml_kvq import Model, default_means, errors
from ggml_kvq.calibrate import files, means, xquant

DEMO = Path(__file__).resolve().parent.parent / "models" / "kvq-demo-q8_0.gguf"
TEXT = "The register file holds sixteen words. Each word is read by the decoder before the next cycle begins. " * 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sidecars")
    fitted = means.fit(DEMO, TEXT, n_sequences=2, length=256, n_threads=2)
    files.write_sidecar(out / "aqua.gguf", files.fields(DEMO, fitted, 4), files.arrays(fitted))
    for name, change in (("tuned", 2), ("other", 128), ("norms", 0)):
        (out / f"{name}.gguf").write_bytes(changed_model(change, name == "norms"))
    return out


def changed_model(change: int, norms: bool) -> bytes:
    """The demo model, q8_0 codes of its keys and values moved by up to `change`; 128: drawn anew."""
    out = bytearray(DEMO.read_bytes())
    rng = np.random.default_rng(1)
    for t in gguf.GGUFReader(DEMO).tensors:
        at, nb = t.data_offset, t.n_bytes
        if t.name.endswith(("attn_k.weight", "attn_v.weight")) and change > 0:
            blocks = np.frombuffer(out[at : at + nb], np.uint8).reshape(-1, 34).copy()
            codes = blocks[:, 2:].view(np.int8)
            moved = rng.integers(-change, change + 1, codes.shape) + (codes if change < 128 else 0)
            codes[:] = np.clip(moved, -127, 127)
            out[at : at + nb] = blocks.tobytes()
        if t.name.endswith("attn_norm.weight") and norms:
            x = np.frombuffer(out[at : at + nb], np.float32) * np.float32(1.02)
            out[at : at + nb] = x.tobytes()
    return bytes(out)


def open_model(model: Path, sidecar: Path | None, **kwargs: Any) -> list[str]:
    """Warnings of opening it; it computes."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with Model(
            model, kwargs.pop("method", "aqua"), kwargs.pop("opts", None), sidecar, n_ctx=256, n_batch=64, n_threads=1
        ) as m:
            assert "".join(m.generate("The", max_tokens=4))
    return [str(w.message) for w in said]


def test_its_own_model_takes_it_without_a_word(folder: Path) -> None:
    assert open_model(DEMO, folder / "aqua.gguf") == []
    meta, data = files.read_sidecar(folder / "aqua.gguf")
    assert data["kvq.model.sketch"].any() and meta["kvq.aqua.blk.0.k.rms"] > 0
    files.embed(DEMO, folder / "aqua.gguf", folder / "embedded.gguf")
    assert open_model(folder / "embedded.gguf", folder / "embedded.gguf") == []


@pytest.mark.parametrize("what", ["bias", "field", "sketch", "many bytes"])
def test_a_damaged_file_is_refused(folder: Path, what: str, tmp_path: Path) -> None:
    raw = bytearray((folder / "aqua.gguf").read_bytes())
    where = {t.name: t.data_offset for t in gguf.GGUFReader(folder / "aqua.gguf").tensors}
    if what == "bias":
        raw[where["kvq.aqua.blk.3.v.bias"] + 8] ^= 1  # one bit of one mean
    elif what == "sketch":
        raw[where["kvq.model.sketch"] + 8] ^= 1
    elif what == "field":
        at = raw.index(b"kvq.aqua.tokens")
        raw[at + len(b"kvq.aqua.tokens") + 4] ^= 1
    else:
        rng = random.Random(5)
        for _ in range(50):
            raw[rng.randrange(min(where.values()), len(raw))] ^= rng.randrange(1, 256)
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(raw)
    with pytest.raises(errors.MethodError, match="damaged|not finite"):
        open_model(DEMO, bad)
    with pytest.raises(errors.KvqError, match="damaged"):
        files.read_sidecar(bad)


@pytest.mark.parametrize(("what", "match"), [("k.bias", "larger than the rows"), ("v.bias", "larger than the rows")])
def test_values_far_from_what_was_calibrated_are_refused_under_a_good_checksum(
    folder: Path, what: str, match: str, tmp_path: Path
) -> None:
    meta, data = files.read_sidecar(folder / "aqua.gguf")
    for name in data:
        if name.endswith(what):
            data[name] = np.clip(data[name] * 1e4, -6e4, 6e4).astype(np.float32)
    files.write_sidecar(tmp_path / "big.gguf", meta, data)
    with pytest.raises(errors.MethodError, match=match):
        open_model(DEMO, tmp_path / "big.gguf")


def older(folder: Path, to: Path, factor: float = 1) -> Path:
    """As a version before checksums wrote it."""
    meta, data = files.read_sidecar(folder / "aqua.gguf")
    writer = gguf.GGUFWriter(to, "kvq")
    writer.add_string("general.type", "kvq")
    for key, value in meta.items():
        if not key.endswith(".rms") and key != "kvq.checksum":
            files._add(writer, key, value)
    for name, x in data.items():
        if name != "kvq.model.sketch":
            writer.add_tensor(name, x * np.float32(factor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def test_an_older_file_loads_with_one_line(folder: Path, tmp_path: Path) -> None:
    (line,) = open_model(DEMO, older(folder, tmp_path / "older.gguf"))
    assert "no checksum" in line and "older" in line
    with pytest.raises(errors.MethodError, match="larger than the rows"):
        open_model(DEMO, older(folder, tmp_path / "older-big.gguf", 1e4))


@pytest.mark.parametrize("kind", ["tuned", "norms", "other"])
@pytest.mark.parametrize("method", ["aqua", "xquant"])
def test_the_models_weights_are_recognised(folder: Path, kind: str, method: str, tmp_path: Path) -> None:
    sidecar = folder / "aqua.gguf"
    if method == "xquant":
        sidecar = tmp_path / "x.gguf"
        meta = {
            **files.identity(DEMO),
            "kvq.version": 1,
            "kvq.method": "xquant",
            "kvq.xquant.window": 64,
            "kvq.model.sketch": files.sketch(DEMO),
        }
        files.write_sidecar(sidecar, meta, {})
    if kind == "other":
        with pytest.raises(errors.MethodError, match="of another model"):
            open_model(folder / "other.gguf", sidecar, method=method)
    else:
        (line,) = open_model(folder / f"{kind}.gguf", sidecar, method=method)
        assert "fine-tune" in line


def xquant_file(to: Path, **changed: object) -> Path:
    meta = {**xquant.fields(DEMO, xquant.Config(4, 4, 12, 12)), **changed}
    files.write_sidecar(to, {key: value for key, value in meta.items() if value is not None}, {})
    return to


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("kvq.version", 0, "is 0, this library reads 1"),
        ("kvq.version", 2, "is 2, this library reads 1"),
        ("kvq.version", None, "is missing"),
        ("kvq.model.n_layer", 13, "is 13, the model has 12"),
        ("kvq.model.n_layer", None, "is missing"),
        ("kvq.model.arch", "qwen2", "is 'qwen2', the model's is 'llama'"),
        ("kvq.model.hash", "0" * 16, "is '0000000000000000', the model's is"),
    ],
)
def test_a_configuration_of_another_model_or_format_is_refused(
    field: str, value: object, words: str, tmp_path: Path
) -> None:
    """Methods without arrays were held to the sketch alone, which an older file lacks."""
    for sketch in ({}, {"kvq.model.sketch": None}):
        sidecar = xquant_file(tmp_path / "x.gguf", **{field: value}, **sketch)
        with pytest.raises(errors.MethodError) as e:
            open_model(DEMO, sidecar, method=None)
        assert f"{field} {words}" in str(e.value) and "make it again with ggml-kvq calibrate" in str(e.value)


@pytest.mark.parametrize("name", ["k.rms", "v.rms"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 0.0, 3])
def test_a_size_of_rows_that_is_none_is_refused(folder: Path, name: str, value: float, tmp_path: Path) -> None:
    """It was read as that of an older file, which has none, and bounded no mean."""
    meta, data = files.read_sidecar(folder / "aqua.gguf")
    files.write_sidecar(tmp_path / "bad.gguf", {**meta, f"kvq.aqua.blk.5.{name}": value}, data)
    words = rf"kvq\.aqua\.blk\.5\.{name[0]}\.(rms is|bias is larger than)"
    with pytest.raises(errors.MethodError, match=words):
        open_model(DEMO, tmp_path / "bad.gguf")


def test_every_bit_that_matters_is_held(tmp_path: Path) -> None:
    """A flip in the name or type of the checksum passed for an older file. What passes now chooses the same: a number
    of another type, and what is not named kvq.*.
    """

    def options(path: Path) -> str:
        with Model(DEMO, kv_config=path, n_ctx=256, n_batch=64, n_threads=1) as m:
            return str(m.kv_stats()["options"])

    good, bad = xquant_file(tmp_path / "x.gguf"), tmp_path / "bad.gguf"
    raw, want = good.read_bytes(), options(good)
    name = raw.index(b"kvq.checksum")
    rng = random.Random(3)
    of_checksum = range(8 * (name - 8), 8 * (name + 32))
    for bit in [*of_checksum, *rng.sample(range(8 * 24, of_checksum[0]), 150), *rng.sample(range(8 * len(raw)), 50)]:
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        bad.write_bytes(flipped)
        try:
            assert options(bad) == want and bit not in of_checksum, f"bit {bit % 8} of byte {bit // 8}"
        except errors.KvqError as e:
            assert "\n" not in str(e)
    bad.write_bytes(raw.replace(b"kvq.checksum", b"kvq.chacksum"))
    for read in (files.read_sidecar, options):
        with pytest.raises(errors.KvqError, match=r"is damaged .*kvq\.checksum"):
            read(bad)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("kvq.xquant.kqq", 4, "kvq.xquant.kqq is no option of xquant that this library knows"),
        ("kvq.xquant.shared", "codes,vm=4", "kvq.xquant.shared is 'codes,vm=4'"),
        ("kvq.xquant.shared", "a\nb", "kvq.xquant.shared is 'a?b'"),
        ("kvq.xquant.kq", np.zeros(2, np.float32), "kvq.xquant.kq is no u32, i32, f32, bool or text"),
    ],
)
def test_an_option_that_would_be_passed_over_is_refused(key: str, value: object, words: str, tmp_path: Path) -> None:
    """Without it the method would be another one than the file asks for."""
    model = DEMO
    sidecar: Path | None = xquant_file(tmp_path / "x.gguf", **{key: value})
    if isinstance(value, np.ndarray):  # as metadata of the model: a tensor is no field
        assert sidecar is not None
        files.embed(DEMO, sidecar, tmp_path / "own.gguf")
        model, sidecar = tmp_path / "own.gguf", None
    with pytest.raises(errors.MethodError, match=re.escape(words)):
        open_model(model, sidecar, method=None)


def test_bytes_that_are_no_text_are_quoted(tmp_path: Path) -> None:
    """A key of a damaged file went into the message, and Python ended in a trace."""
    bad = xquant_file(tmp_path / "x.gguf", **{"kvq.checksum": None})
    bad.write_bytes(bad.read_bytes().replace(b"kvq.xquant.kq", b"kvq.xquant.k\xf1"))
    with pytest.raises(errors.MethodError, match="kvq.xquant.k\N{REPLACEMENT CHARACTER} is no option"):
        open_model(DEMO, bad, method=None)


def requantized(to: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """The demo model, its keys' and values' projections in another type."""
    reader = gguf.GGUFReader(DEMO)
    writer = gguf.GGUFWriter(to, "llama")
    for key, f in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(
                key, f.contents(), f.types[0], sub_type=f.types[-1] if f.types[0] == gguf.GGUFValueType.ARRAY else None
            )
    for t in reader.tensors:
        if t.name.endswith(("attn_k.weight", "attn_v.weight")):
            x = gguf.quants.dequantize(t.data, t.tensor_type)
            writer.add_tensor(t.name, gguf.quants.quantize(x, kind), raw_dtype=kind)
        else:
            writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


@pytest.mark.parametrize("kind", ["F16", "Q4_0"])
def test_another_quantisation_is_the_same_model(folder: Path, kind: str, tmp_path: Path) -> None:
    model = requantized(tmp_path / "model.gguf", gguf.GGMLQuantizationType[kind])
    assert open_model(model, folder / "aqua.gguf") == []


@pytest.mark.parametrize("room", [4096, 12288, 17000])
def test_a_disk_that_fills_up_leaves_no_sidecar(folder: Path, room: int, tmp_path: Path) -> None:
    """numpy's tofile, by which gguf writes tensors, says nothing of it."""
    meta, data = files.read_sidecar(folder / "aqua.gguf")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(errors.KvqError, match="could not be written"):
            files.write_sidecar(tmp_path / "cut.gguf", meta, data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_means_that_were_cut_off_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_CACHE_DIR", str(tmp_path))
    there = default_means.path_of(DEMO)
    there.parent.mkdir(parents=True)
    there.write_bytes(b"GGUF\3\0\0\0")
    assert default_means.ensure(DEMO, print, 1) == (str(there), "")
    files.read_sidecar(there)
