"""The metadata of a GGUF file, read fast: the launchers look into every model before its program starts.

gguf-py's GGUFReader imports numpy and walks every vocabulary entry through it; measured on an 8k-token model it costs
a quarter of a second, and seconds at 150k tokens. Here arrays of numbers are skipped by one addition and arrays of
text by one step per entry.
Format: ggml/docs/gguf.md of llama.cpp. All numbers little-endian.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
import struct
from dataclasses import dataclass
from typing import Any

from .errors import KvqError

# value type id -> struct code; 8 is string, 9 is array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_NAME = 1 << 16
# Encoders and diffusion models: llama.cpp makes no memory for them (llama_model::create_memory).
WITHOUT_CACHE = {
    "bert",
    "dream",
    "eurobert",
    "gemma-embedding",
    "jina-bert-v2",
    "jina-bert-v3",
    "llada",
    "llada-moe",
    "modern-bert",
    "neo-bert",
    "nomic-bert",
    "nomic-bert-moe",
    "rnd1",
    "wavtokenizer-dec",
}


# Layers with a sliding window where the file has no array of them (load_swa_pattern and its callers in llama.cpp's
# src/models): one layer of so many sees everything, the last of them, or the first (negative). 1: each does; 0: none.
_WHOLE_ONE_OF = {
    "afmoe": 4,
    "cohere2": 4,
    "cohere2moe": -4,
    "deepseek4": 0,
    "exaone-moe": 4,
    "exaone4": 4,
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gpt-oss": 2,
    "laguna": -4,
    "lfm2": 0,
    "lfm2moe": 0,
    "llama4": 4,
    "mellum": 4,
    "muse-glimmer": 4,
    "olmo2": 4,
    "phi3": 1,
    "plamo3": 8,
    "smallthinker": -4,
}
# Windows of architectures that have one without saying so.
_WINDOWS = {"exaone-moe": 128, "exaone4": 4096, "gemma2": 4096, "llama4": 8192}


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
    """A tensor's name, shape (ggml order: fastest first), ggml type id and offset into the file's data (bytes)."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int = 0

    def n_bytes(self) -> int:
        """Size of its data in bytes, 0 for a type that is not known here."""
        block, size = _TYPE_SIZES.get(self.type, (1, 0))
        return math.prod(self.shape) // block * size


@dataclass(frozen=True)
class Header:
    """path, GGUF version, metadata (short arrays as lists, long ones as Array) and, when asked for, tensors."""

    path: str
    version: int
    n_tensors: int
    fields: dict[str, Any]
    tensors: tuple[Tensor, ...] = ()
    data_start: int = 0

    def data_end(self) -> int:
        """Bytes that a whole file has at least; only known when the tensors were asked for."""
        return self.data_start + max((t.offset + t.n_bytes() for t in self.tensors), default=0)

    def check_whole(self) -> None:
        """GgufError when the file ends inside the data of its tensors: a download that stopped."""
        size, end = os.path.getsize(self.path), self.data_end()
        if size < end:
            raise GgufError(
                f"{self.path} is cut off: it has {size} bytes, its tensors end at {end}; fetch or convert it again"
            )

    def kvq(self) -> dict[str, Any]:
        """The fields under `kvq.`."""
        return {key: value for key, value in self.fields.items() if key.startswith("kvq.")}


_TYPE_NAMES = {
    0: "u8",
    1: "i8",
    2: "u16",
    3: "i16",
    4: "u32",
    5: "i32",
    6: "f32",
    7: "bool",
    8: "string",
    9: "array",
    10: "u64",
    11: "i64",
    12: "f64",
}


# ggml type id -> (values of a block, bytes of a block); ggml/src/ggml.c, type_traits
_TYPE_SIZES = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74),
    18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2),
    26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
    40: (64, 36), 41: (128, 18), 42: (64, 18),
}  # fmt: skip


def type_bits(kind: int) -> float:
    """Bits of a value of a ggml type, block scales included. KeyError for a type that is not known here."""
    block, size = _TYPE_SIZES[kind]
    return size * 8 / block


class _Cursor:
    def __init__(self, data: mmap.mmap, path: str) -> None:
        self.data, self.path, self.at, self.end = data, path, 0, len(data)

    def fail(self, what: str) -> GgufError:
        return GgufError(f"{self.path} is not a valid GGUF file: {what} at byte {self.at}; fetch or convert it again")

    def take(self, n: int) -> int:
        """Advance by n bytes; the old position."""
        if n < 0 or self.at + n > self.end:
            raise GgufError(
                f"{self.path} is cut off: it ends after {self.end} bytes, inside its header; fetch or convert it again"
            )
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


MODEL, SIDECAR = "a .gguf model", "a sidecar that ggml-kvq calibrate wrote"


def read(path: str | os.PathLike[str], *, tensors: bool = False, max_array: int = 1024, wanted: str = MODEL) -> Header:
    """Header of the GGUF file at `path`. Arrays longer than max_array are not read (Array stands for them). wanted:
    what a file that is no GGUF should have been.

    Raises FileNotFoundError and other OSError as open() does, GgufError for a file that is not GGUF, foreign or cut
    off.
    """
    name = os.fspath(path)
    if stat.S_ISFIFO(os.stat(name).st_mode):  # open() would wait for somebody who writes
        raise GgufError(f"{name} is a pipe, and a model is read from many places at once; save it to a file")
    with open(name, "rb") as f:
        if f.read(4) != b"GGUF":
            raise GgufError(f"{name} is not a GGUF file (it does not begin with 'GGUF'); give {wanted}")
        size = os.fstat(f.fileno()).st_size
        if size < 24:
            raise GgufError(
                f"{name} is cut off: it ends after {size} bytes, inside its header; fetch or convert it again"
            )
        with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, name)
            cursor.at = 4
            version = cursor.scalar("I")
            if version not in (2, 3):
                raise GgufError(
                    f"{name} is GGUF version {version}, this reads 2 and 3 (little-endian); convert it again with a"
                    " current llama.cpp"
                )
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
                infos.append(Tensor(tensor, shape, cursor.scalar("I"), cursor.scalar("Q")))
            alignment = fields.get("general.alignment", 32)
            alignment = alignment if isinstance(alignment, int) and alignment > 0 else 32
            start = -(-cursor.at // alignment) * alignment if infos else 0
            return Header(name, version, n_tensors, fields, tuple(infos), start)


def _attending(header: Header, n_layer: int) -> set[int] | None:
    """Layers whose tensors are those of attention, in files that give one number of heads for all; None: all, or not
    known.

    The rule of gguf/config.cpp: a file that is one of several holds only some of the tensors.
    """
    if not header.tensors or header.fields.get("split.count", 1) != 1:
        return None
    keys: set[int] = set()
    fused: set[int] = set()
    state: set[int] = set()
    for tensor in header.tensors:
        part = tensor.name.split(".")
        if len(part) < 3 or part[0] != "blk" or not part[1].isdigit():
            continue
        il, what = int(part[1]), part[2]
        if what == "attn_k" or what.startswith("attn_kv_"):
            keys.add(il)
        elif what == "attn_qkv":
            fused.add(il)
        elif what.startswith("ssm_"):
            state.add(il)
    out = {il for il in keys | (fused - state) if il < n_layer}
    return out if 0 < len(out) < n_layer else None


def attention_layers(header: Header) -> list[tuple[int, int, int, int]]:
    """(layer index, KV heads, K head size, V head size) of every layer that keeps K and V, from llama.cpp's metadata
    keys.

    Sliding-window layers with head sizes of their own ({arch}.attention.{key,value}_length_swa) are told apart by
    {arch}.attention.sliding_window_pattern when it is an array. Raises GgufError when the file describes no attention.
    """
    fields = header.fields
    arch = fields.get("general.architecture")
    if not isinstance(arch, str):
        raise GgufError(f"{header.path} names no general.architecture; give a model, not a sidecar or adapter file")
    if arch in WITHOUT_CACHE:
        raise GgufError(f"{header.path} ({arch}) keeps no KV cache: llama.cpp makes none for it; give another model")

    def get(key: str, default: Any = None) -> Any:
        return fields.get(f"{arch}.{key}", default)

    n_layer, n_head, width = get("block_count"), get("attention.head_count"), get("embedding_length")
    if not n_layer or not n_head or not width:
        raise GgufError(
            f"{header.path} ({arch}) has no block_count, attention.head_count or embedding_length: no attention cache"
            " to plan"
        )

    def per_layer(value: Any, il: int) -> int:
        return int(value[il]) if isinstance(value, list) else int(value)

    n_head_kv = get("attention.head_count_kv", n_head)
    attends = _attending(header, int(n_layer)) if not isinstance(n_head_kv, list) else None
    pattern = get("attention.sliding_window_pattern")
    out = []
    for il in range(int(n_layer)):
        heads, heads_kv = per_layer(n_head, il), per_layer(n_head_kv, il)
        if not heads or not heads_kv or (attends and il not in attends):
            continue  # recurrent or attention-free layer
        sliding = isinstance(pattern, list) and il < len(pattern) and bool(pattern[il])
        key, value = get("attention.key_length", width // heads), get("attention.value_length", width // heads)
        if sliding:
            key, value = get("attention.key_length_swa", key), get("attention.value_length_swa", value)
        out.append((il, heads_kv, int(key), int(value)))
    return out


def window(header: Header) -> tuple[int, set[int] | None]:
    """(tokens, layers) of sliding windows, as llama.cpp takes them: layers that see so many tokens are in a cache of
    their own. Layers None: the file does not say which, and the rule of the architecture is not known here.
    """
    fields = header.fields
    arch = fields.get("general.architecture")

    def get(key: str, default: Any = 0) -> Any:
        return fields.get(f"{arch}.attention.{key}", default)

    n_layer = int(fields.get(f"{arch}.block_count", 0))
    tokens = get("sliding_window", _WINDOWS.get(str(arch), 0))
    pattern, one_of = get("sliding_window_pattern", None), _WHOLE_ONE_OF.get(str(arch))
    if not isinstance(tokens, int) or tokens <= 0 or one_of == 1 or (arch == "exaone4" and n_layer != 64):
        return 0, set()
    if isinstance(pattern, list):
        return tokens, {il for il, windowed in enumerate(pattern[:n_layer]) if windowed}
    if one_of is None:
        return tokens, None
    n = pattern if one_of and isinstance(pattern, int) else abs(one_of)
    whole = 0 if one_of < 0 else n - 1
    return tokens, {il for il in range(n_layer) if not n or il % n != whole}


def trained_for(header: Header) -> int:
    """Tokens of the context that the model was trained for; 0 when it does not say."""
    found = header.fields.get(f"{header.fields.get('general.architecture')}.context_length", 0)
    return found if isinstance(found, int) else 0
