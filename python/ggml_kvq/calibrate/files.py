"""Calibrated data in GGUF: as a sidecar (general.type "kvq", tensors), or as metadata arrays inside a model file, which unmodified
llama.cpp ignores (it refuses unknown tensors). Layout: kvq.version, kvq.method, kvq.model.*, kvq.aqua.*,
kvq.aqua.blk.<il>.{k,v}.{bias,weight}, kvq.aqua.blk.<il>.prev; in a model file each array is a u8 array with .type and .shape (outermost
first) beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from .. import gguf_header
from ..errors import KvqError
from ..files import whole as whole_file
from .means import Means
from .predictors import Bits, Fit

VERSION = 1


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as e:
        raise KvqError("writing GGUF needs the package gguf: pip install 'ggml-kvq[calibrate]'") from e
    return gguf


def model_hash(arch: str, tokens: list[str]) -> str:
    """64-bit FNV-1a of the architecture and every token, each with a final zero byte, in hexadecimal: fits every quantisation of a model."""
    h = 0xCBF29CE484222325
    for text in [arch, *tokens]:
        for byte in text.encode("utf-8", "surrogateescape").split(b"\0")[0] + b"\0":
            h = (h ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{h:016x}"


def identity(path: str | os.PathLike[str]) -> dict[str, Any]:
    """kvq.model.* of a model file."""
    header = gguf_header.read(path, max_array=1 << 24)
    arch = header.fields["general.architecture"]
    layers = gguf_header.attention_layers(header)
    return {
        "kvq.model.arch": arch,
        "kvq.model.n_layer": int(header.fields[f"{arch}.block_count"]),
        "kvq.model.n_embd_k_gqa": max(h * k for _, h, k, _ in layers),
        "kvq.model.n_embd_v_gqa": max(h * v for _, h, _, v in layers),
        "kvq.model.hash": model_hash(arch, header.fields.get("tokenizer.ggml.tokens", [])),
    }


def arrays(means: Means) -> dict[str, np.ndarray]:
    """Names and f32 vectors."""
    return {f"kvq.aqua.blk.{il}.{name}.bias": x for il, pair in means.mean.items() for name, x in zip("kv", pair)}


def fields(path: str | os.PathLike[str], means: Means, sinks: int) -> dict[str, Any]:
    return {
        "kvq.version": VERSION,
        "kvq.method": "aqua",
        **identity(path),
        "kvq.aqua.predictor": "bias",
        "kvq.aqua.sinks": sinks,
        "kvq.aqua.tokens": means.n_tokens,
    }


def predictor_arrays(fit: Fit) -> dict[str, np.ndarray]:
    """Names, f32 vectors and rows of matrices (f16, or uint8 rows of q4_0 blocks)."""
    out: dict[str, np.ndarray] = {}
    for il, layer in fit.layers.items():
        for name, mean, weight in zip("kv", layer.mean, layer.weight):
            out[f"kvq.aqua.blk.{il}.{name}.bias"] = mean
            if weight is not None:
                out[f"kvq.aqua.blk.{il}.{name}.weight"] = weight
    return out


def predictor_fields(path: str | os.PathLike[str], fit: Fit, bits: Bits, sinks: int) -> dict[str, Any]:
    return {
        "kvq.version": VERSION,
        "kvq.method": "aqua",
        **identity(path),
        "kvq.aqua.predictor": fit.predictor,
        "kvq.aqua.inputs": "k of the layer before; k of this layer, v of the layer before",
        "kvq.aqua.k_bits": bits.k,
        "kvq.aqua.v_bits": bits.v,
        "kvq.aqua.first_bits": bits.first,
        "kvq.aqua.sinks": sinks,
        "kvq.aqua.tokens": fit.n_tokens,
        **{f"kvq.aqua.blk.{il}.prev": layer.prev for il, layer in fit.layers.items() if layer.prev >= 0},
    }


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def write_sidecar(out: str | os.PathLike[str], meta: dict[str, Any], data: dict[str, np.ndarray]) -> None:
    """Write a sidecar, whole or not at all. KvqError when that fails."""
    with whole_file(out, need=sum(x.nbytes for x in data.values())) as partial:
        _write_sidecar(partial, meta, data)


def _write_sidecar(out: Path, meta: dict[str, Any], data: dict[str, np.ndarray]) -> None:
    gguf = _gguf()
    writer = gguf.GGUFWriter(os.fspath(out), "kvq")
    writer.add_string("general.type", "kvq")
    for key, value in meta.items():
        _add(writer, key, value)
    for name, x in data.items():
        kind = gguf.GGMLQuantizationType.Q4_0 if x.dtype == np.uint8 else None
        writer.add_tensor(name, np.ascontiguousarray(x), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_sidecar(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(kvq.* fields, arrays) of a sidecar."""
    gguf = _gguf()
    reader = gguf.GGUFReader(os.fspath(path))
    if "general.type" not in reader.fields or reader.fields["general.type"].contents() != "kvq":
        raise KvqError(f"{os.fspath(path)} is no sidecar of calibrated data (general.type is not kvq); ggml-kvq calibrate writes one")
    meta = {key: f.contents() for key, f in reader.fields.items() if key.startswith("kvq.")}
    return meta, {t.name: np.array(t.data) for t in reader.tensors}


def embed(model: str | os.PathLike[str], sidecar: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Copy of a model file with the sidecar's data as metadata, whole or not at all. Refuses a sidecar of another model."""
    gguf_header.read(model, tensors=True).check_whole()
    with whole_file(out, need=os.path.getsize(model) + os.path.getsize(sidecar)) as partial:
        _embed(model, sidecar, partial)


def _embed(model: str | os.PathLike[str], sidecar: str | os.PathLike[str], out: Path) -> None:
    gguf = _gguf()
    meta, data = read_sidecar(sidecar)
    for key, value in identity(model).items():
        if meta.get(key) != value:
            raise KvqError(f"{os.fspath(sidecar)}: {key} is {meta.get(key)!r}, the model's is {value!r}; calibrate this model")
    reader = gguf.GGUFReader(os.fspath(model))
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(os.fspath(out), arch, endianess=reader.endianess)
    if "general.alignment" in reader.fields:
        writer.data_alignment = reader.fields["general.alignment"].contents()
    for key, f in reader.fields.items():
        if key.startswith(("GGUF.", "kvq.")) or key == "general.architecture":
            continue
        sub = f.types[-1] if f.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, f.contents(), f.types[0], sub_type=sub)
    for key, value in meta.items():
        _add(writer, key, value)
    for name, x in data.items():
        raw = np.ascontiguousarray(x).tobytes()
        shape = [x.shape[0], x.shape[1] // 18 * 32] if x.dtype == np.uint8 else x.shape
        writer.add_key_value(name, raw, gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType.UINT8)
        writer.add_string(name + ".type", {"float32": "f32", "float16": "f16", "uint8": "q4_0"}[str(x.dtype)])
        writer.add_key_value(name + ".shape", [int(n) for n in shape], gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType.UINT32)
    for t in reader.tensors:
        writer.add_tensor_info(t.name, t.data.shape, t.data.dtype, t.data.nbytes, t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for t in reader.tensors:
        writer.write_tensor_data(t.data, tensor_endianess=reader.endianess)
    writer.close()
