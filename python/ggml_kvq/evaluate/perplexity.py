"""Perplexity and KL divergence over windows of a text: the protocol of llama-perplexity, chunk by chunk.

A window is n_ctx tokens, its first one replaced by BOS when the model wants one. Without a stride the windows lie end
to end and tokens n_ctx/2+1 .. n_ctx-1 of each are scored; with a stride a window starts every `stride` tokens and its
last `stride` tokens are scored. The base file is llama-perplexity's own format (--kl-divergence-base), so either
program can write it and either can read it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .. import files
from ..errors import KvqError
from . import metrics

if TYPE_CHECKING:
    from ..core.model import Model

Tokens = npt.NDArray[np.int32]
Progress = Callable[[int], object]
SAME = 1.0  # nats: other weights of one model (f16 beside 4 bits) stay below, another model does not
_MAGIC = b"_logits_"


@dataclass(frozen=True)
class Protocol:
    """Window length n_ctx (tokens), n_ubatch tokens decoded at once, stride (0: windows end to end), max_chunks (0:
    all).
    """

    n_ctx: int
    n_ubatch: int
    stride: int = 0
    max_chunks: int = 0

    def __post_init__(self) -> None:
        if self.n_ctx < 8:
            raise KvqError(f"n_ctx={self.n_ctx} is too short to score; choose 8 or more")
        if not 0 <= self.stride < self.n_ctx:
            raise KvqError(f"stride={self.stride} must be 0 or below n_ctx={self.n_ctx}")

    @property
    def first(self) -> int:
        """First position whose prediction counts."""
        return self.n_ctx - self.stride - 1 if self.stride else self.n_ctx // 2

    @property
    def n_scored(self) -> int:
        """Scored predictions of a window."""
        return self.n_ctx - 1 - self.first

    def windows(self, tokens: Sequence[int] | Tokens) -> Tokens:
        """int32 [n_windows, n_ctx]; KvqError when the text is shorter than two windows."""
        ids = np.asarray(tokens, np.int32)
        if len(ids) < 2 * self.n_ctx:
            raise KvqError(
                f"{len(ids)} tokens are too few for windows of {self.n_ctx}; give {2 * self.n_ctx} or more, or lower"
                " n_ctx"
            )
        step = self.stride or self.n_ctx
        n = (len(ids) - self.n_ctx + step - 1) // step if self.stride else len(ids) // self.n_ctx
        n = min(n, self.max_chunks) if self.max_chunks else n
        return np.stack([ids[i * step : i * step + self.n_ctx] for i in range(n)])


def text_tokens(model: Model, text: str | Sequence[int] | Tokens) -> Tokens:
    """Token ids of a text, BOS in front when the model wants one (as llama-perplexity tokenises)."""
    ids = model.tokenize(text, add_bos=True, special=False) if isinstance(text, str) else text
    return np.asarray(ids, np.int32)


@dataclass
class CodesRead:
    """How much of what was scored read codes: tokens scored, and those of them that were decoded after pages had
    been sealed.
    """

    n_scored: int = 0
    n_read: int = 0

    def share(self) -> float:
        return self.n_read / max(1, self.n_scored)


def n_sealed(model: Model) -> int:
    """Pages sealed since the cache was made; 0 for upstream's caches, which have none."""
    return int(model.kv_stats().get("n_sealed", 0))


def score(
    model: Model, window: Tokens, protocol: Protocol, codes: CodesRead | None = None
) -> Iterator[tuple[npt.NDArray[np.float32], Tokens]]:
    """Decode one window; yields (logits float32 [n, n_vocab], next tokens int32 [n]) of scored positions, batch by
    batch.

    codes: counts, where given, the scored tokens whose batch found sealed pages.
    """
    if protocol.n_ctx > model.n_ctx:
        raise KvqError(
            f"n_ctx={protocol.n_ctx} exceeds the model's context of {model.n_ctx}; open it with a larger n_ctx"
        )
    if protocol.n_ubatch > model.n_ubatch:
        raise KvqError(
            f"n_ubatch={protocol.n_ubatch} exceeds the context's {model.n_ubatch}; open the model with a larger"
            " n_ubatch"
        )
    ids = window.copy()
    if model.add_bos:
        ids[0] = model.bos
    wanted = np.zeros(len(ids), bool)
    wanted[protocol.first : -1] = True
    model.reset()
    row = protocol.first + 1
    before = n_sealed(model) if codes else 0
    for at in range(0, len(ids), protocol.n_ubatch):
        part = slice(at, at + protocol.n_ubatch)
        if codes and wanted[part].any():
            n = int(wanted[part].sum())
            codes.n_scored += n
            codes.n_read += n if n_sealed(model) > before else 0
        for logits in model.feed(ids[part], outputs=wanted[part]):
            yield logits, window[row : row + len(logits)]
            row += len(logits)


def perplexity(
    model: Model, text: str | Sequence[int] | Tokens, protocol: Protocol, progress: Progress | None = None
) -> float:
    """exp(mean negative log-likelihood) of the scored tokens."""
    total, count = 0.0, 0
    for window in protocol.windows(text_tokens(model, text)):
        for logits, targets in score(model, window, protocol):
            lp = metrics.log_softmax(logits)
            total -= float(lp[np.arange(len(lp)), targets].sum(dtype=np.float64))
            count += len(lp)
        if progress:
            progress(1)
    return math.exp(total / count)


class BaseFile:
    """Packed log-probabilities of the f16 cache, one window at a time, on disk.

    Bytes: "_logits_", i32 n_ctx, i32 n_vocab, i32 n_windows, i32 tokens [n_windows][n_ctx], then per window
    n_scored rows of metrics.row_words(n_vocab) u16.
    """

    def __init__(self, path: str | os.PathLike[str], protocol: Protocol, windows: Tokens, n_vocab: int) -> None:
        self.path, self.protocol, self.windows, self.n_vocab = Path(path), protocol, windows, n_vocab
        self._head = 8 + 12 + windows.size * 4
        self._row = metrics.row_words(n_vocab) * 2

    def header(self) -> bytes:
        numbers = np.array([self.protocol.n_ctx, self.n_vocab, len(self.windows)], np.int32)
        return _MAGIC + numbers.tobytes() + self.windows.astype("<i4").tobytes()

    def n_bytes(self) -> int:
        return self._head + len(self.windows) * self.protocol.n_scored * self._row

    def complete(self) -> bool:
        """True when the file holds all rows of exactly these windows."""
        if not self.path.is_file() or self.path.stat().st_size != self.n_bytes():
            return False
        with open(self.path, "rb") as f:
            return f.read(self._head) == self.header()

    def write(self, model: Model, progress: Progress | None = None) -> None:
        """Run the reference cache over all windows; the file appears under its name only when whole."""
        with files.whole(self.path, need=self.n_bytes()) as partial, open(partial, "wb") as f:
            f.write(self.header())
            for window in self.windows:
                f.writelines(metrics.pack(logits).tobytes() for logits, _ in score(model, window, self.protocol))
                if progress:
                    progress(1)

    def check(self, model: Model) -> None:
        """KvqError when `model`, with its f16 cache, did not write this: the format names no model. Decodes one window
        up to the first rows.
        """
        out, rows = metrics.Divergence(), self.rows(0)
        for logits, targets in score(model, self.windows[0], self.protocol):
            if len(logits):
                out.add(logits, rows[: len(logits)], targets)
                break
        apart = float(np.concatenate(out.kld).mean())
        if not apart < SAME:
            raise KvqError(
                f"{self.path} is of another model: on the same words its f16 cache is {apart:.3g} nats apart; remove it"
                " or give another --base"
            )

    def rows(self, i: int) -> npt.NDArray[np.uint16]:
        """Packed rows of window i, uint16 [n_scored, row_words], read from disk."""
        n = self.protocol.n_scored
        offset = self._head + i * n * self._row
        return np.fromfile(self.path, "<u2", n * self._row // 2, offset=offset).reshape(n, -1)


def divergence(
    model: Model, base: BaseFile, progress: Progress | None = None, codes: CodesRead | None = None
) -> metrics.Divergence:
    """The cache of `model` against the base on the same windows. Memory: one window of packed rows, one batch of
    logits.
    """
    if model.n_vocab != base.n_vocab:
        raise KvqError(
            f"{base.path} holds {base.n_vocab} tokens a row, the model has {model.n_vocab}; use the same model"
        )
    out = metrics.Divergence()
    for i, window in enumerate(base.windows):
        rows, at = base.rows(i), 0
        for logits, targets in score(model, window, base.protocol, codes):
            out.add(logits, rows[at : at + len(logits)], targets)
            at += len(logits)
        out.ends.append(sum(map(len, out.kld)))
        if progress:
            progress(1)
    return out
