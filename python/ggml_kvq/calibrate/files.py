"""Calibrated data in GGUF: as a sidecar (general.type "kvq", tensors), or as metadata arrays inside a model file,
which unmodified llama.cpp ignores (it refuses unknown tensors). Layout: kvq.version, kvq.method, kvq.model.*,
kvq.aqua.*, kvq.aqua.blk.<il>.{k,v}.{bias,weight,rms}, kvq.aqua.blk.<il>.prev, kvq.model.sketch (what the weights
are), kvq.checksum; in a model file each array is a u8 array with .type and .shape (outermost first) beside it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from .. import gguf_header
from ..core import native
from ..core.loader import libraries
from ..errors import KvqError
from ..files import whole as whole_file
from ..progress import Line
from .means import Means
from .predictors import Bits, Fit

VERSION = 1


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as e:
        raise KvqError("writing GGUF needs the package gguf: pip install 'gguf>=0.18'") from e
    return gguf


def model_hash(arch: str, tokens: list[str]) -> str:
    """64-bit FNV-1a of the architecture and every token, each with a final zero byte, in hexadecimal: fits every
    quantisation of a model.
    """
    h = 0xCBF29CE484222325
    for text in [arch, *tokens]:
        for byte in text.encode("utf-8", "surrogateescape").split(b"\0")[0] + b"\0":
            h = (h ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{h:016x}"


def identity(path: str | os.PathLike[str]) -> dict[str, Any]:
    """kvq.model.* of a model file."""
    header = gguf_header.read(path, tensors=True, max_array=1 << 24)
    arch = header.fields["general.architecture"]
    layers = gguf_header.attention_layers(header)
    return {
        "kvq.model.arch": arch,
        "kvq.model.n_layer": int(header.fields[f"{arch}.block_count"]),
        "kvq.model.n_embd_k_gqa": max(h * k for _, h, k, _ in layers),
        "kvq.model.n_embd_v_gqa": max(h * v for _, h, _, v in layers),
        "kvq.model.hash": model_hash(arch, header.fields.get("tokenizer.ggml.tokens", [])),
    }


def sketch(path: str | os.PathLike[str]) -> np.ndarray:
    """f32 [50 * layers], what the model's weights are whatever their quantisation (gguf/fingerprint.h)."""
    lib = libraries().need_kvq()
    n = lib.kvq_model_sketch(os.fsencode(path), None, 0)
    if not n:
        raise KvqError(native.last_error(lib))
    out = np.zeros(n, np.float32)
    lib.kvq_model_sketch(os.fsencode(path), out.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), n)
    return out


def _format(x: np.ndarray) -> tuple[str, list[int]]:
    """GGUF's name of the type, and the shape, outermost first; rows of q4_0 blocks come as uint8."""
    shape = [x.shape[0], x.shape[1] // 18 * 32] if x.dtype == np.uint8 else [int(n) for n in x.shape]
    return {"float32": "f32", "float16": "f16", "uint8": "q4_0", "int8": "i8"}[str(x.dtype)], shape


def checksum(meta: dict[str, Any], data: dict[str, np.ndarray]) -> str:
    """CRC-32 of everything but kvq.checksum itself, by name (gguf/fingerprint.h reads it)."""
    crc = 0
    for name, x in sorted([*meta.items(), *data.items()]):
        if not name.startswith("kvq.") or name == "kvq.checksum":
            continue
        if isinstance(x, np.ndarray):
            kind, shape = _format(x)
            head, body = (
                b"a" + kind.encode() + b"\0" + np.array(shape, "<u4").tobytes(),
                np.ascontiguousarray(x).tobytes(),
            )
        elif isinstance(x, str):
            head, body = b"s", x.encode()
        else:
            head, body = (b"f", struct.pack("<f", x)) if isinstance(x, float) else (b"u", struct.pack("<I", x))
        crc = zlib.crc32(body, zlib.crc32(head, zlib.crc32(name.encode() + b"\0", crc)))
    return f"{crc:08x}"


def arrays(means: Means) -> dict[str, np.ndarray]:
    """Names and f32 vectors."""
    out = {f"kvq.aqua.blk.{il}.{name}.bias": x for il, pair in means.mean.items() for name, x in zip("kv", pair)}
    if means.pairs == "sorted":
        for il, (channel, gain) in means.order.items():
            out |= {f"kvq.aqua.blk.{il}.k.order": channel, f"kvq.aqua.blk.{il}.k.gain": gain}
    for il, (channel, gain) in means.left.items():
        out |= {f"kvq.aqua.blk.{il}.k.left.order": channel, f"kvq.aqua.blk.{il}.k.left.gain": gain}
    for il, x in means.bases.items():
        at = f"kvq.aqua.blk.{il}"
        out |= {f"{at}.k.axes": x.keys.axes, f"{at}.k.read": x.read, f"{at}.v.axes": x.values.axes}
    return out


def _order(climb: str) -> dict[str, Any]:
    """Option `order` of method auto, where it is known."""
    return {} if climb == "none" else {"kvq.auto.order": climb}


def _alone(layers: Iterable[int], alone: Iterable[int]) -> dict[str, Any]:
    """Option `alone` of method auto: layers by their number among those with attention."""
    number = {il: str(i) for i, il in enumerate(sorted(layers))}
    text = ".".join(number[il] for il in sorted(alone))
    return {"kvq.auto.alone": text} if text else {}


def fields(path: str | os.PathLike[str], means: Means, sinks: int) -> dict[str, Any]:
    return {
        "kvq.version": VERSION,
        "kvq.method": "aqua",
        **identity(path),
        "kvq.model.sketch": sketch(path),
        **{f"kvq.aqua.blk.{il}.{name}.rms": x for il, pair in means.rms.items() for name, x in zip("kv", pair)},
        "kvq.aqua.predictor": "bias",
        "kvq.aqua.sinks": sinks,
        "kvq.aqua.tokens": means.n_tokens,
        "kvq.auto.pairs": means.pairs,
        **_order(means.climb if means.pairs == "sorted" else "none"),
        **({"kvq.auto.coords": means.coords, **_alone(means.mean, means.alone)} if means.coords else {}),
        **({"kvq.aqua.coords": 0} if means.coords == 0 else {}),  # tried, and not worth their bytes
    }


def predictor_arrays(fit: Fit) -> dict[str, np.ndarray]:
    """Names, f32 vectors and rows of matrices (f16, or uint8 rows of q4_0 blocks)."""
    out: dict[str, np.ndarray] = {}
    folds = fit.predictor == "fold"
    for il, layer in fit.layers.items():
        for name, mean, weight in zip("kv", layer.mean, layer.weight):
            out[f"kvq.aqua.blk.{il}.{name}.bias"] = mean
            if weight is not None:
                out[f"kvq.aqua.blk.{il}.{name}.{'fold' if folds and name == 'v' else 'weight'}"] = weight
        for name, order in (("k", layer.order), ("k.left", layer.left)):
            if order is not None:
                out[f"kvq.aqua.blk.{il}.{name}.order"] = order[0].reshape(-1)
                out[f"kvq.aqua.blk.{il}.{name}.gain"] = order[1].reshape(-1)
    return out


def predictor_fields(path: str | os.PathLike[str], fit: Fit, bits: Bits, sinks: int) -> dict[str, Any]:
    return {
        "kvq.version": VERSION,
        "kvq.method": "aqua",
        **identity(path),
        "kvq.model.sketch": sketch(path),
        **{
            f"kvq.aqua.blk.{il}.{name}.rms": x
            for il, layer in fit.layers.items()
            for name, x in zip("kv", layer.rms)
            if x > 0
        },
        "kvq.aqua.predictor": fit.predictor,
        "kvq.aqua.inputs": (
            f"k of the layer before; k of this layer, {'k' if fit.predictor == 'fold' else 'v'} of the layer before"
        ),
        "kvq.aqua.k_bits": bits.k,
        "kvq.aqua.v_bits": bits.v,
        "kvq.aqua.first_bits": bits.first,
        "kvq.aqua.sinks": sinks,
        "kvq.aqua.tokens": fit.n_tokens,
        "kvq.auto.pairs": fit.pairs,
        **_order(fit.climb()),
        **_alone(fit.layers, fit.alone),
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
    """Write a sidecar, whole or not at all; arrays among the fields become tensors too. KvqError when that fails."""
    with whole_file(out, need=sum(x.nbytes for x in data.values())) as partial:
        _write_sidecar(partial, meta, data)
        _check_written(partial)
        read_sidecar(partial)


def _check_written(partial: Path) -> None:
    """OSError for a file that ends early: numpy's tofile, which gguf writes by, is silent about a disk that is full."""
    try:
        gguf_header.read(partial, tensors=True).check_whole()
    except KvqError as e:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from e


def _write_sidecar(out: Path, meta: dict[str, Any], data: dict[str, np.ndarray]) -> None:
    gguf = _gguf()
    data = {**{key: x for key, x in meta.items() if isinstance(x, np.ndarray)}, **data}
    meta = {key: x for key, x in meta.items() if not isinstance(x, np.ndarray) and key != "kvq.checksum"}
    meta["kvq.checksum"] = checksum(meta, data)
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
    header = gguf_header.read(path, tensors=True, wanted=gguf_header.SIDECAR)
    header.check_whole()  # one line, where GGUFReader has a trace
    reader = gguf.GGUFReader(os.fspath(path))
    if "general.type" not in reader.fields or reader.fields["general.type"].contents() != "kvq":
        raise KvqError(
            f"{os.fspath(path)} is no sidecar of calibrated data (general.type is not kvq); ggml-kvq calibrate"
            " writes one"
        )
    meta = {key: f.contents() for key, f in reader.fields.items() if key.startswith("kvq.")}
    data = {t.name: np.array(t.data) for t in reader.tensors}
    if "kvq.model.sketch" in data and "kvq.checksum" not in meta:  # whoever writes one writes the other
        raise KvqError(
            f"{os.fspath(path)} is damaged (kvq.model.sketch is in it and kvq.checksum is not); calibrate again"
        )
    if meta.get("kvq.checksum", checksum(meta, data)) != checksum(meta, data):
        raise KvqError(
            f"{os.fspath(path)} is damaged (checksum {checksum(meta, data)}, {meta['kvq.checksum']} when it was made);"
            " calibrate again"
        )
    return meta, data


def embed(
    model: str | os.PathLike[str],
    sidecar: str | os.PathLike[str],
    out: str | os.PathLike[str],
    line: Line | None = None,
) -> None:
    """Copy of a model file with the sidecar's data as metadata, whole or not at all. Refuses a sidecar of another
    model. line: shows how far it is.
    """
    header = gguf_header.read(model, tensors=True)
    header.check_whole()
    if header.fields.get("split.count", 1) != 1:
        raise KvqError(
            f"{os.fspath(model)} is one of {header.fields['split.count']} files of a model, which llama.cpp knows by"
            " their names; merge them first (llama-gguf-split --merge), or use the sidecar as it is"
        )
    with whole_file(out, need=os.path.getsize(model) + os.path.getsize(sidecar)) as partial:
        _embed(model, sidecar, partial, line or Line(False))
        _check_written(partial)


def _embed(model: str | os.PathLike[str], sidecar: str | os.PathLike[str], out: Path, line: Line) -> None:
    gguf = _gguf()
    line(f"reading {os.path.basename(model)}")
    meta, data = read_sidecar(sidecar)
    for key, value in identity(model).items():
        if meta.get(key) != value:
            raise KvqError(
                f"{os.fspath(sidecar)}: {key} is {meta.get(key)!r}, the model's is {value!r}; calibrate this model"
            )
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
        kind, shape = _format(x)
        writer.add_key_value(name, raw, gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType.UINT8)
        writer.add_string(name + ".type", kind)
        writer.add_key_value(name + ".shape", shape, gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType.UINT32)
    for t in reader.tensors:
        writer.add_tensor_info(t.name, t.data.shape, t.data.dtype, t.data.nbytes, t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    total, done = sum(t.data.nbytes for t in reader.tensors), 0
    for t in reader.tensors:
        writer.write_tensor_data(t.data, tensor_endianess=reader.endianess)
        done += t.data.nbytes
        line(f"copying {os.path.basename(model)}: {100 * done // total} % of {total / (1 << 20):.0f} MiB")
    writer.close()
