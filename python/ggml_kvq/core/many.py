"""Texts as a whole: many at once, the sequences of one context, each with its own sampling and its own end; and the
embedding of one.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from .. import processes
from ..errors import ArgumentTypeError, ContextOverflowError, DecodeError, KvqError
from . import arguments, llama
from .loader import LogLines, last_problem, log
from .sampling import Chain, Sampling
from .writer import Writer, before

if TYPE_CHECKING:
    from .model import Model


@dataclass
class _Text:
    """A prompt on its way to a text, in sequence `seq` of the context."""

    number: int
    seq: int
    pending: list[int]  # tokens that are not in the cache
    chain: Chain
    writer: Writer
    n_held: int = 0
    n_sampled: int = 0
    parts: list[str] = field(default_factory=list)


class Many:
    """What Model has for whole texts."""

    finish_reasons: list[str]

    def embed(self: Any, text: str | Sequence[int], *, pooling: str = "mean") -> npt.NDArray[np.float32]:
        """The embedding of a text: float32 [n_embd], of length 1. The cache is empty afterwards.

        pooling: "mean" of all tokens, or "last", the last token's. Of a model that was made for texts, not for
        embeddings, the last token's says what comes next rather than what the text is about.
        """
        if pooling not in ("mean", "last"):
            raise KvqError(f"pooling={pooling!r} is unknown; pass 'mean' or 'last'")
        lib = self._libs.llama
        ids = self.tokenize(text, add_bos=True) if isinstance(text, str) else text
        ids = arguments.id_array(ids, self.n_vocab)
        if not len(ids):
            raise KvqError(f"text={text!r:.60} has no token; pass some text")
        wanted = np.arange(len(ids)) >= (0 if pooling == "mean" else len(ids) - 1)
        total = np.zeros(int(lib.llama_model_n_embd(self._model)), np.float64)
        with self._lock:
            self._check_idle()
            self.reset()
            lib.llama_set_embeddings(self._ctx, True)
            try:
                # a part at a time: llama.cpp keeps logits beside every embedding
                for part in self.feed(ids, outputs=wanted, n_ubatch=min(128, self.n_ubatch)):
                    for i in range(len(part)):
                        row = lib.llama_get_embeddings_ith(self._ctx, i - len(part))
                        if not row:
                            raise KvqError(f"{self.path} pools its tokens by itself; use llama-server --embeddings")
                        total += np.ctypeslib.as_array(row, total.shape)
            finally:
                lib.llama_set_embeddings(self._ctx, False)
                self.reset()
        norm = float(np.linalg.norm(total))
        out: npt.NDArray[np.float32] = (total / (norm or 1.0)).astype(np.float32)
        return out

    def generate_many(
        self: Any,
        prompts: Iterable[str | Sequence[int]],
        *,
        max_tokens: int = 128,
        stop: Sequence[str] | str = (),
        special: bool = False,
        sampling: Sampling | Sequence[Sampling] | None = None,
        **options: Any,
    ) -> list[str]:
        """Texts that continue `prompts`, in their order. Up to n_seq_max of them are decoded together; when one ends,
        the next prompt takes its place. Each sequence has n_ctx / n_seq_max tokens of room.

        As generate(reset=True) for each, and like it at temperature 0, but for what rounds differently when rows of
        several texts are computed together. sampling: one for all, or one for each prompt. Afterwards finish_reasons
        has "stop", "eos", "length" or "context" for each, and the cache is empty.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Iterable):
            what = "one text" if isinstance(prompts, str) else f"a {type(prompts).__name__}"
            raise ArgumentTypeError(f"prompts={prompts!r:.60} is {what}; pass a list of texts")
        prompts = list(prompts)
        if isinstance(sampling, Sequence):
            each = [arguments.sampling(s, {}) for s in sampling]
            if len(each) != len(prompts) or options:
                raise KvqError(f"{len(each)} samplings for {len(prompts)} prompts; pass one for each, and no options")
        else:
            each = [arguments.sampling(sampling, options)] * len(prompts)
        stops, max_tokens = arguments.stops(stop), arguments.at_least("max_tokens", max_tokens, -1)
        with self._lock:
            lib, ctx = self._libs.llama, self._open()
            self._check_idle()
            self.reset()
            room = int(lib.llama_n_ctx_seq(ctx))
            waiting: deque[tuple[int, list[int]]] = deque()
            for number, prompt in enumerate(prompts):
                ids = (
                    self.tokenize(prompt, add_bos=True, special=special)
                    if isinstance(prompt, str)
                    else arguments.id_array(prompt, self.n_vocab).tolist()
                )
                if not ids:
                    raise KvqError(f"prompt {number} is empty; give it some text")
                if len(ids) > room:
                    what = f"has {len(ids)} tokens, and a sequence has room for {room} (n_ctx / n_seq_max)"
                    raise ContextOverflowError(f"prompt {number} {what}; give a prompt that fits, or a larger n_ctx")
                waiting.append((number, ids))
            texts, self.finish_reasons = [""] * len(prompts), [""] * len(prompts)
            running: list[_Text] = []
            free, rows = list(range(self.n_seq_max)), _Rows(self.n_batch, self.n_seq_max)
            try:
                while waiting or running:
                    while waiting and free:
                        number, ids = waiting.popleft()
                        chain = Chain(lib, self.n_vocab, each[number])
                        for token in ids:
                            chain.accept(token)
                        writer = Writer(stops, before(self.piece, ids))
                        running.append(_Text(number, free.pop(0), ids, chain, writer))
                    ended = [t for t in running if max_tokens == 0]
                    for text, token in [] if ended else _step(self, rows, running):
                        reason = _take(self, text, token, max_tokens, room)
                        if reason:
                            self.finish_reasons[text.number] = reason
                            ended.append(text)
                    for text in ended:
                        texts[text.number] = "".join(text.parts)
                        self.finish_reasons[text.number] = self.finish_reasons[text.number] or "length"
                        lib.llama_memory_seq_rm(self._memory, text.seq, -1, -1)
                        text.chain.close()
                        running.remove(text)
                        free.append(text.seq)
            finally:
                for text in running:
                    text.chain.close()
                self.reset()
            return texts


def _take(model: Model, text: _Text, token: int, max_tokens: int, room: int) -> str:
    """A token that was sampled for a text; why the text ends, "" when it goes on."""
    if model._ends(token):
        text.parts.append(text.writer.rest())
        return "eos"
    text.n_sampled += 1
    text.pending = [token]
    part, stopped = text.writer.add(model.piece(token))
    text.parts.append(part)
    if stopped:
        return "stop"
    reason = "length" if text.n_sampled == max_tokens else "context" if text.n_held >= room else ""
    if reason:
        text.parts.append(text.writer.rest(is_whole=False))
    return reason


class _Rows:
    """Rows of a batch, whose memory serves all steps."""

    def __init__(self, most: int, n_seq_max: int) -> None:
        int32 = ctypes.POINTER(ctypes.c_int32)
        self.n, self.most = 0, most
        self._ids = (ctypes.c_int32 * n_seq_max)(*range(n_seq_max))
        self._places = [ctypes.cast(ctypes.addressof(self._ids) + 4 * i, int32) for i in range(n_seq_max)]
        self._token, self._pos = (ctypes.c_int32 * most)(), (ctypes.c_int32 * most)()
        self._ones, self._seq = (ctypes.c_int32 * most)(*[1] * most), (int32 * most)()
        self._output = (ctypes.c_int8 * most)()

    def add(self, tokens: list[int], pos: int, seq: int, output: bool) -> None:
        """Tokens of sequence `seq` from position `pos` on; output: the last one's logits are asked for."""
        begin, self.n = self.n, self.n + len(tokens)
        here, at = slice(begin, self.n), list(range(pos, pos + len(tokens)))
        self._token[here] = cast("list[Any]", tokens)
        self._pos[here] = cast("list[Any]", at)
        self._seq[here] = [self._places[seq]] * len(tokens)
        self._output[here] = [0] * len(tokens)
        self._output[self.n - 1] = output

    def batch(self) -> llama.llama_batch:
        """What llama_decode takes; its arrays are those of this object."""
        return llama.llama_batch(
            n_tokens=self.n,
            token=self._token,
            pos=self._pos,
            n_seq_id=self._ones,
            seq_id=self._seq,
            logits=self._output,
        )


def _step(model: Model, rows: _Rows, running: list[_Text]) -> list[tuple[_Text, int]]:
    """Decode one batch: a token of every text that is being written, and as much of prompts as there is room for.
    Texts whose tokens are all in the cache now, with the token that was sampled.
    """
    rows.n = 0
    at: list[tuple[_Text, int]] = []
    for text in sorted(running, key=lambda t: len(t.pending)):
        part = text.pending[: rows.most - rows.n]
        if not part:
            continue
        last = len(part) == len(text.pending)
        rows.add(part, text.n_held, text.seq, last)
        text.pending, text.n_held = text.pending[len(part) :], text.n_held + len(part)
        if last:
            at.append((text, rows.n - 1))
    batch, ctx, decode = rows.batch(), model._open(), model._libs.llama.llama_decode

    def call() -> tuple[int, list[tuple[_Text, int]], LogLines]:
        log.begin()
        status = decode(ctx, batch)
        return status, [] if status else [(text, text.chain.sample(ctx, i)) for text, i in at], log.end()

    try:
        abort = model._stop if rows.n > len(at) or model._lab is not None else None
        status, sampled, lines = processes.compute(call, abort)
    finally:
        model._edits += 1
    if model._lab is not None:
        model._lab.check()
    if status:
        raise DecodeError(f"decoding {rows.n} tokens of {len(running)} texts failed: {last_problem(lines)}")
    return sampled
