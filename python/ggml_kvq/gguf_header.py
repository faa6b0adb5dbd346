"""The metadata of a GGUF file, read fast: the launchers look into every model before its program starts.

gguf-py's GGUFReader imports numpy and walks every vocabulary entry through it; measured on an 8k-token model it costs a quarter of a
second, and seconds at 150k tokens. Here arrays of numbers are skipped by one addition and arrays of text by one step per entry.
Format: ggml/docs/gguf.md of llama.cpp. All numbers little-endian.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any

from .errors import KvqError

# value type id -> struct code; 8 is string, 9 is array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_NAME = 1 << 16


class GgufError(KvqError, ValueError):
    """Not a readable GGUF file; one line with the path and what is wrong."""


@dataclass(frozen=True)
class Array:
    """An array that was not read: its length and its element type ("u8", "string", ...)."""

    n: int
    type: str

    def __str__(self) -> str:
        return f"[{self.type} x {self.n}]"


@dataclass(frozen=True)
class Tensor:
    """A tensor's name, shape (ggml order: fastest first) and ggml type id."""

    name: str
    shape: tuple[int, ...]
    type: int


@dataclass(frozen=True)
class Header:
    """path, GGUF version, metadata (short arrays as lists, long ones as Array) and, when asked for, tensors."""

    path: str
    version: int
    n_tensors: int
    fields: dict[str, Any]
    tensors: tuple[Tensor, ...] = ()

    def kvq(self) -> dict[str, Any]:
        """The fields under `kvq.`."""
        return {key: value for key, value in self.fields.items() if key.startswith("kvq.")}


_TYPE_NAMES = {0: "u8", 1: "i8", 2: "u16", 3: "i16", 4: "u32", 5: "i32", 6: "f32", 7: "bool", 8: "string", 9: "array", 10: "u64", 11: "i64", 12: "f64"}


class _Cursor:
    def __init__(self, data: mmap.mmap, path: str) -> None:
        self.data, self.path, self.at, self.end = data, path, 0, len(data)

    def fail(self, what: str) -> GgufError:
        return GgufError(f"{self.path} is not a valid GGUF file: {what} at byte {self.at}; fetch or convert it again")

    def take(self, n: int) -> int:
        """Advance by n bytes; the old position."""
        if n < 0 or self.at + n > self.end:
            raise GgufError(f"{self.path} is cut off: it ends after {self.end} bytes, inside its header; fetch or convert it again")
        at, self.at = self.at, self.at + n
        return at

    def scalar(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize("<" + code)))[0]

    def text(self, limit: int | None = None) -> str:
        n = self.scalar("Q")
        if limit is not None and n > limit:
            raise self.fail(f"a name of {n} bytes")
        at = self.take(n)
        return self.data[at : at + n].decode("utf-8", "replace")

    def value(self, kind: int, max_array: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY or depth > 2:
            raise self.fail(f"unknown value type {kind}")
        inner, n = self.scalar("I"), self.scalar("Q")
        if n <= max_array:
            return [self.value(inner, max_array, depth + 1) for _ in range(n)]
        if inner in _SCALARS:
            self.take(n * struct.calcsize("<" + _SCALARS[inner]))
        elif inner == _STRING:
            unpack, data, at, end = struct.Struct("<Q").unpack_from, self.data, self.at, self.end
            for _ in range(n):
                if at + 8 > end:
                    break
                at += 8 + unpack(data, at)[0]
            self.take(at - self.at)
        else:
            for _ in range(n):
                self.value(inner, max_array, depth + 1)
        return Array(n, _TYPE_NAMES.get(inner, str(inner)))


def read(path: str | os.PathLike[str], *, tensors: bool = False, max_array: int = 1024) -> Header:
    """Header of the GGUF file at `path`. Arrays longer than max_array are not read (Array stands for them).

    Raises FileNotFoundError and other OSError as open() does, GgufError for a file that is not GGUF, foreign or cut off.
    """
    name = os.fspath(path)
    with open(name, "rb") as f:
        if f.read(4) != b"GGUF":
            raise GgufError(f"{name} is not a GGUF file (it does not begin with 'GGUF'); give a .gguf model")
        size = os.fstat(f.fileno()).st_size
        if size < 24:
            raise GgufError(f"{name} is cut off: it ends after {size} bytes, inside its header; fetch or convert it again")
        with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, name)
            cursor.at = 4
            version = cursor.scalar("I")
            if version not in (2, 3):
                raise GgufError(f"{name} is GGUF version {version}, this reads 2 and 3 (little-endian); convert it again with a current llama.cpp")
            n_tensors, n_fields = cursor.scalar("Q"), cursor.scalar("Q")
            if n_fields > size or n_tensors > size:
                raise cursor.fail(f"{n_fields} fields and {n_tensors} tensors in {size} bytes")
            fields: dict[str, Any] = {}
            for _ in range(n_fields):
                key = cursor.text(_MAX_NAME)
                fields[key] = cursor.value(cursor.scalar("I"), max_array)
            infos = []
            for _ in range(n_tensors if tensors else 0):
                tensor = cursor.text(_MAX_NAME)
                n_dims = cursor.scalar("I")
                if n_dims > 8:
                    raise cursor.fail(f"tensor {tensor!r} of {n_dims} dimensions")
                shape = tuple(cursor.scalar("Q") for _ in range(n_dims))
                infos.append(Tensor(tensor, shape, cursor.scalar("I")))
                cursor.take(8)
            return Header(name, version, n_tensors, fields, tuple(infos))


def attention_layers(header: Header) -> list[tuple[int, int, int, int]]:
    """(layer index, KV heads, K head size, V head size) of every layer that keeps K and V, from llama.cpp's metadata keys.

    Sliding-window layers with head sizes of their own ({arch}.attention.{key,value}_length_swa) are told apart by
    {arch}.attention.sliding_window_pattern when it is an array. Raises GgufError when the file describes no attention.
    """
    fields = header.fields
    arch = fields.get("general.architecture")
    if not isinstance(arch, str):
        raise GgufError(f"{header.path} names no general.architecture; give a model, not a sidecar or adapter file")

    def get(key: str, default: Any = None) -> Any:
        return fields.get(f"{arch}.{key}", default)

    n_layer, n_head, width = get("block_count"), get("attention.head_count"), get("embedding_length")
    if not n_layer or not n_head or not width:
        raise GgufError(f"{header.path} ({arch}) has no block_count, attention.head_count or embedding_length: no attention cache to plan")

    def per_layer(value: Any, il: int) -> int:
        return int(value[il]) if isinstance(value, list) else int(value)

    n_head_kv = get("attention.head_count_kv", n_head)
    pattern = get("attention.sliding_window_pattern")
    out = []
    for il in range(int(n_layer)):
        heads, heads_kv = per_layer(n_head, il), per_layer(n_head_kv, il)
        if not heads or not heads_kv:
            continue  # recurrent or attention-free layer
        sliding = isinstance(pattern, list) and il < len(pattern) and bool(pattern[il])
        key, value = get("attention.key_length", width // heads), get("attention.value_length", width // heads)
        if sliding:
            key, value = get("attention.key_length_swa", key), get("attention.value_length_swa", value)
        out.append((il, heads_kv, int(key), int(value)))
    return out
