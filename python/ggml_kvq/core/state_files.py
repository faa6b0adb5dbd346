"""State files of blocks (state=compact, state=packed): a state of llama.cpp without its zeros.

    "kvqs"   u32 version   u32 1: compact, 2: packed   u32 CRC-32 of all that follows   u32 tokens   u64 bytes of the
    state   i32 tokens ... then, until the state is complete:   u64 zeros   u64 bytes   u64 bytes in the file   and
    those

llama.cpp's state has room for f16 rows; the blocks of a compact one fill its beginning of every tensor
(store/state_blocks.h). packed: pieces are deflated where that makes them smaller: zlib at level 1, since zstd and
higher levels save the same share of such blocks within 0.03 bits a value.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import StateError

MAGIC, VERSION, COMPACT, PACKED = b"kvqs", 1, 1, 2
_HEAD = struct.Struct("<4sIIIIQ")
_PIECE = struct.Struct("<QQQ")
_PAGE = 4096
_MOST = 1 << 26  # bytes of a piece


def zeros(size: int) -> mmap.mmap:
    """Private memory of `size` bytes that takes room where it is written only."""
    return mmap.mmap(
        -1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    )


def _pieces(data: mmap.mmap) -> list[tuple[int, int]]:
    """(first, end) of what is not zero, whole pages of memory first and then without the zeros at the end."""
    out: list[tuple[int, int]] = []
    raw = np.frombuffer(data, np.uint8)
    for start in range(0, len(raw), _MOST):
        part = raw[start : start + _MOST]
        n = len(part) // _PAGE
        used = part[: n * _PAGE].view(np.uint64).reshape(n, -1).max(1).astype(bool).tolist() if n else []
        if len(part) > n * _PAGE:
            used.append(bool(part[n * _PAGE :].any()))
        for i, is_used in enumerate(used):
            at = start + i * _PAGE
            if is_used and out and out[-1][1] == at and at - out[-1][0] < _MOST:
                out[-1] = (out[-1][0], min(at + _PAGE, len(raw)))
            elif is_used:
                out.append((at, min(at + _PAGE, len(raw))))
    return [(a, a + int(np.flatnonzero(raw[max(a, b - _PAGE) : b])[-1]) + 1 + max(a, b - _PAGE) - a) for a, b in out]


def write(path: Path, tokens: npt.NDArray[np.int32], data: mmap.mmap, packed: bool) -> None:
    """Write the state `data` of a cache that holds `tokens`. OSError when the disk is full."""
    size, crc, at = len(data), 0, 0
    with open(path, "wb") as f:
        f.write(bytes(_HEAD.size))

        def put(part: bytes | memoryview) -> None:
            nonlocal crc
            crc = zlib.crc32(part, crc)
            f.write(part)

        put(tokens.astype("<i4").tobytes())
        for a, b in [*_pieces(data), (size, size)]:
            raw = data[a:b]
            stored = zlib.compress(raw, 1) if packed else raw
            stored = stored if len(stored) < len(raw) else raw
            put(_PIECE.pack(a - at, b - a, len(stored)))
            put(stored)
            at = b
        rest = _HEAD.pack(MAGIC, VERSION, PACKED if packed else COMPACT, 0, len(tokens), size)[16:]
        f.seek(0)
        f.write(_HEAD.pack(MAGIC, VERSION, PACKED if packed else COMPACT, zlib.crc32(rest, crc), len(tokens), size))


def read(path: Path) -> tuple[npt.NDArray[np.int32], mmap.mmap] | None:
    """(tokens, state), or None for a file of another kind. StateError when it is damaged."""
    broken = StateError(f"{path} is damaged or cut off: its checksum does not fit; save the state again")
    with open(path, "rb") as f:
        head = f.read(_HEAD.size)
        if head[:4] != MAGIC:
            return None
        if len(head) < _HEAD.size:
            raise broken
        _, version, kind, want, n_tokens, size = _HEAD.unpack(head)
        if version != VERSION or kind not in (COMPACT, PACKED):
            raise StateError(
                f"{path} is a state file of version {version}.{kind}, this ggml-kvq reads version {VERSION}; save the"
                " state again"
            )
        crc = 0
        while part := f.read(1 << 22):
            crc = zlib.crc32(part, crc)
        if zlib.crc32(head[16:], crc) != want:
            raise broken
        f.seek(_HEAD.size)
        left = os.fstat(f.fileno()).st_size - _HEAD.size
        if 4 * n_tokens > left:
            raise broken
        tokens = np.frombuffer(f.read(4 * n_tokens), "<i4").astype(np.int32)
        try:
            data = zeros(size)
        except (OSError, ValueError, OverflowError) as e:
            raise StateError(
                f"{path} holds a state of {size} bytes, which does not fit into memory; save a shorter one"
            ) from e
        at = 0
        while at < size:
            piece = f.read(_PIECE.size)
            if len(piece) < _PIECE.size:
                raise broken
            gap, n, n_stored = _PIECE.unpack(piece)
            stored = f.read(min(n_stored, left))
            if at + gap + n > size or n_stored > n or len(stored) != n_stored:
                raise broken
            try:
                data[at + gap : at + gap + n] = stored if n_stored == n else zlib.decompress(stored, bufsize=n)
            except (zlib.error, IndexError, ValueError) as e:
                raise broken from e
            at += gap + n
    return tokens, data
