"""Saved states of a Model: a file of llama.cpp's own format, written whole or not at all, and refused with one line
when it is damaged.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .. import files, processes
from ..errors import KvqError, StateError
from . import arguments, kvstats, native, state_files
from .loader import LogLines, last_problem, log

if TYPE_CHECKING:
    from .model import Model

_MAGIC = b"nsgg"  # LLAMA_SESSION_MAGIC 'ggsn', little endian


def _tag(tokens: list[int]) -> int:
    """32 bits that rows of a cache carry beside their checksum (kvq_state_begin): CRC-32 of the tokens, never 0."""
    return zlib.crc32(struct.pack(f"<{len(tokens)}i", *tokens)) or 1


def save(model: Model, path: str | os.PathLike[str]) -> None:
    """Write tokens and cache of `model` to `path`, in llama.cpp's format or, with the option state=compact or
    packed, in that of state_files.py. Raises StateError; what was there before is then still there.
    """
    name = arguments.path(path)
    try:
        target = files.target_of(name)
    except OSError as e:
        raise StateError(f"{name} could not be written: {e.strerror}; give the name of a file") from e
    try:
        files.keep_inputs(target, "the state", model.path)
    except KvqError as e:
        raise StateError(str(e)) from e
    form = kvstats.option(model._options, "state") if model.kv_method is not None else "rows"
    with model._lock, processes.interrupt_held():
        ctx = model._open()
        model._enter_unfed()
        ids = np.asarray(model._tokens, np.int32)
        try:
            with files.unfinished(target) as partial:
                if form in ("compact", "packed"):
                    data = _in_one_thread(model, _tag(ids.tolist()), lambda: _state_data(model)).result
                    state_files.write(partial, ids, data, form == "packed")
                else:
                    at = ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
                    save_file = model._libs.llama.llama_state_save_file
                    done = _in_one_thread(
                        model, _tag(ids.tolist()), lambda: save_file(ctx, os.fsencode(partial), at, len(ids))
                    )
                    if not done.result:
                        raise StateError(
                            f"{target} could not be written: {last_problem(done.lines)}; check folder and disk space"
                        )
                files.finish(partial, target)
        except OSError as e:
            raise StateError(f"{target} could not be written: {e.strerror}; check folder and disk space") from e


@dataclass
class _Done:
    """What a call of llama.cpp's returned and logged; of our library: its error, and the tag that a state carried."""

    result: Any
    lines: LogLines
    reason: str
    tag: int


def _in_one_thread(model: Model, tag: int, call: Callable[[], Any]) -> _Done:
    """`call` in the thread that computes. States are made by all threads of that one's team, and what the library keeps
    of a state belongs to the thread.
    """
    kvq = model._libs.kvq if model.kv_method is not None else None

    def whole() -> _Done:
        if kvq is not None:
            kvq.kvq_state_begin(tag)
        log.begin()
        try:
            result = call()
        finally:
            lines = log.end()
            reason = native.last_error(kvq) if kvq is not None else ""
            carried = kvq.kvq_state_tag() if kvq is not None else 0
            if kvq is not None:
                kvq.kvq_state_begin(0)
        return _Done(result, lines, reason, carried)

    return processes.compute(whole)


def _state_data(model: Model) -> mmap.mmap:
    """The state in memory: as large as with f16 rows, but pages of it that stay zero take no memory."""
    lib, ctx = model._libs.llama, model._open()
    size = lib.llama_state_get_size(ctx)
    data = state_files.zeros(size)
    view = (ctypes.c_uint8 * size).from_buffer(data)
    got = lib.llama_state_get_data(ctx, view, size)
    del view
    if got != size:
        raise StateError(f"llama.cpp gave {got} bytes of a state of {size}; save the state again")
    return data


def _check_head(source: Path) -> None:
    """Magic and length of the token list; llama.cpp itself would read past the end of a short file."""
    if not source.is_file():
        raise StateError(f"{source} is not a file; give a path that save_state wrote")
    with open(source, "rb") as f:
        head, size = f.read(12), os.fstat(f.fileno()).st_size
    if head[:4] != _MAGIC:
        raise StateError(f"{source} is no saved state (magic {head[:4]!r}); give a path that save_state wrote")
    if len(head) < 12 or 12 + 4 * struct.unpack_from("<I", head, 8)[0] > size:
        raise StateError(f"{source} is cut off after {size} bytes; save the state again")


def _set_state_data(model: Model, ids: npt.NDArray[np.int32], data: mmap.mmap, out: Any, n: Any) -> bool:
    """As llama_state_load_file does, from memory; False when it does not fit."""
    size = len(data)
    if len(ids) > len(out):
        return False
    view = (ctypes.c_uint8 * size).from_buffer(data)
    got = model._libs.llama.llama_state_set_data(model._open(), view, size)
    del view
    out[: len(ids)], n.value = ids.tolist(), len(ids)
    return bool(got == size)


def load(model: Model, path: str | os.PathLike[str]) -> int:
    """Restore what save() wrote; returns the number of tokens held. StateError when the file is not whole or not of
    this model: the cache is then empty, or as it was when the file does not even begin like a state.
    """
    source = Path(arguments.path(path))
    blocks = state_files.read(source) if source.is_file() else None
    if blocks is None:
        _check_head(source)
    elif model.kv_method is None:
        raise StateError(
            f"{source} holds blocks of a compressed cache (state=compact); pass the kv_method that it was saved with"
        )
    elif len(blocks[0]) > model.n_ctx:
        raise StateError(f"{source} holds {len(blocks[0])} tokens, and n_ctx is {model.n_ctx}; pass a larger n_ctx")
    with model._lock, processes.interrupt_held():
        ctx = model._open()
        model.reset()
        out = (ctypes.c_int32 * model.n_ctx)()
        n = ctypes.c_size_t()

        def enter() -> bool:
            if blocks is not None:
                return _set_state_data(model, *blocks, out, n)
            load_file = model._libs.llama.llama_state_load_file
            return bool(load_file(ctx, os.fsencode(source), out, model.n_ctx, ctypes.byref(n)))

        done = _in_one_thread(model, 0, enter)
        tag, tokens = done.tag, list(out[: n.value])
        if not done.result or done.reason:
            model.reset()
            if done.reason:
                raise StateError(f"{source}: {done.reason}")
            problem = last_problem(done.lines)
            if "end of file" in problem or "read error" in problem or "failed to read" in problem:
                raise StateError(f"{source} is cut off ({problem}); save the state again")
            # llama.cpp itself does not see every file's end and then reads what was in memory
            raise StateError(
                f"{source} is cut off or damaged, or does not fit this context: {problem}; use the model it was saved"
                " with and n_ctx >= its length"
            )
        if tag and tag != _tag(tokens):
            model.reset()
            raise StateError(
                f"{source} is damaged: its tokens are not those that were saved with the cache; save the state again"
            )
        if any(not 0 <= t < model.n_vocab for t in tokens):
            model.reset()
            raise StateError(
                f"{source} is damaged: its tokens are outside the vocabulary of {model.n_vocab}; save the state again"
            )
        held = model._libs.llama.llama_memory_seq_pos_max(model._memory, 0) + 1
        if len(tokens) != held:
            model.reset()
            raise StateError(
                f"{source} is damaged: it lists {len(tokens)} tokens and holds {held}; save the state again"
            )
        model._tokens = tokens
    return len(tokens)
