"""A step of a generation: decode the token that was sampled last, sample the next one. Both are one call of the thread
that computes, without views of arrays: a GPU's token takes 3 ms, and what Python adds is seen.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from .. import processes
from ..errors import ContextOverflowError, DecodeError
from . import llama
from .loader import LogLines, last_problem, log
from .sampling import Chain

if TYPE_CHECKING:
    from .model import Model

_PROBLEMS = {1: "no room in the KV cache", 2: "aborted", -1: "invalid batch"}


def check_room(model: Model, n: int) -> None:
    """ContextOverflowError when `n` more tokens do not fit."""
    total = len(model._tokens) + n
    if total > model.n_ctx:
        raise ContextOverflowError(
            f"{total} tokens exceed n_ctx={model.n_ctx}; open the model with a larger n_ctx or shorten the text"
        )


def check_decoded(status: int, lines: LogLines, n: int, n_past: int) -> None:
    """DecodeError when llama_decode of `n` tokens behind `n_past` did not return 0."""
    if status:
        what = _PROBLEMS.get(status, f"status {status}")
        raise DecodeError(
            f"decoding {n} tokens at {n_past} failed ({what}): {last_problem(lines)}; reset() and try again"
        )


def _is_on_gpu(model: Model) -> bool:
    """Do GPUs compute all layers? A call of a token then needs no team of threads."""
    return model._n_gpu_layers > model.n_layer and not any("CPU" in device for device in model.devices)


class Step:
    """One token at a time."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._token, output = (ctypes.c_int32 * 1)(), (ctypes.c_int8 * 1)(1)
        self._batch = llama.llama_batch(n_tokens=1, token=self._token, logits=output)
        self._here = model._lab is None and _is_on_gpu(model)

    def next(self, ids: list[int], chain: Chain) -> int:
        """Append `ids` to the cache and sample the token after them. Raises ContextOverflowError, DecodeError."""
        if len(ids) == 1 and self.model._lab is None:
            return self._next(ids[0], chain)
        for _ in self.model.feed(ids):
            pass
        return chain.sample(self.model.context)

    def _next(self, token: int, chain: Chain) -> int:
        model = self.model
        with model._lock:
            ctx, decode, n_past = model._open(), model._libs.llama.llama_decode, len(model._tokens)
            check_room(model, 1)
            self._token[0] = token

            def call() -> tuple[int, int, LogLines]:
                log.begin()
                status = decode(ctx, self._batch)
                return status, -1 if status else chain.sample(ctx), log.end()

            try:
                if self._here:
                    with processes.interrupt_held():
                        status, sampled, lines = call()
                else:
                    status, sampled, lines = processes.compute(call)
            finally:
                if model._libs.llama.llama_memory_seq_pos_max(model._memory, 0) >= n_past:
                    model._tokens.append(token)
                model._edits += 1
            check_decoded(status, lines, 1, n_past)
            return sampled
