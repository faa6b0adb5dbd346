"""Sampling options and the upstream sampler chain they become."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ..errors import ArgumentTypeError, KvqError
from . import llama


@dataclass(frozen=True)
class Sampling:
    """Options of one generation. Every sampler is upstream's (llama_sampler_*), in llama-cli's order:
    penalties, top-k, top-p, min-p, temperature, distribution.

    temperature: 0 takes the most likely token (greedy). top_k: 0 keeps all tokens. top_p: 1 keeps all.
    min_p: 0 keeps all, else tokens below min_p times the top probability go. repeat_penalty: 1 is off; it looks at the
    last `repeat_last_n` tokens. seed: None draws one at random.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value, whole = getattr(self, field.name), field.name in ("top_k", "repeat_last_n", "seed")
            if field.name == "seed" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, numbers.Integral if whole else numbers.Real):
                raise ArgumentTypeError(
                    f"{field.name}={value!r} is a {type(value).__name__}; pass a"
                    f" {'whole number' if whole else 'number'}"
                )
        checks: list[tuple[str, float, bool, str]] = [
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 or more"),
            ("top_k", self.top_k, 0 <= self.top_k < 1 << 31, "0 (all) or more, below 2147483648"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]"),
            ("repeat_penalty", self.repeat_penalty, 0 < self.repeat_penalty < math.inf, "above 0 (1 is off)"),
            ("repeat_last_n", self.repeat_last_n, 0 <= self.repeat_last_n < 1 << 31, "0 (off) to 2147483647"),
            ("frequency_penalty", self.frequency_penalty, math.isfinite(self.frequency_penalty), "that is finite"),
            ("presence_penalty", self.presence_penalty, math.isfinite(self.presence_penalty), "that is finite"),
        ]
        for name, value, ok, cure in checks:
            if not ok:
                raise KvqError(f"{name}={value} is out of range; choose a value {cure}")
        if self.seed is not None and not 0 <= self.seed < llama.DEFAULT_SEED:
            raise KvqError(
                f"seed={self.seed} is out of range; choose 0 to {llama.DEFAULT_SEED - 1}, or None for random"
            )


class Chain:
    """Owner of a llama_sampler chain; close() frees it once."""

    def __init__(self, lib: Any, n_vocab: int, options: Sampling) -> None:
        self._lib = lib
        self._chain: int | None = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        o, self._n_vocab = options, n_vocab
        penalties = o.repeat_penalty != 1 or o.frequency_penalty or o.presence_penalty
        self._is_best = o.temperature == 0 and not penalties  # the first of the largest logits, as llama.cpp's greedy
        if penalties:
            self._add(
                lib.llama_sampler_init_penalties(
                    n_vocab, o.repeat_last_n, o.repeat_penalty, o.frequency_penalty, o.presence_penalty
                )
            )
        if o.temperature == 0:
            self._add(lib.llama_sampler_init_greedy())
            return
        if o.top_k:
            self._add(lib.llama_sampler_init_top_k(o.top_k))
        if o.top_p < 1:
            self._add(lib.llama_sampler_init_top_p(o.top_p, 1))
        if o.min_p > 0:
            self._add(lib.llama_sampler_init_min_p(o.min_p, 1))
        self._add(lib.llama_sampler_init_temp(o.temperature))
        self._add(lib.llama_sampler_init_dist(llama.DEFAULT_SEED if o.seed is None else o.seed))

    def _add(self, sampler: int) -> None:
        self._lib.llama_sampler_chain_add(self._chain, sampler)

    def accept(self, token: int) -> None:
        """Show a prompt token to the penalties."""
        self._lib.llama_sampler_accept(self._chain, token)

    def sample(self, ctx: int, row: int = -1) -> int:
        """Sample from an output of `ctx` (token `row` of its last batch, -1: the last one) and accept the token."""
        if self._is_best:  # llama.cpp makes a list of the whole vocabulary first: 1 ms for 150,000 tokens
            logits = self._lib.llama_get_logits_ith(ctx, row)
            return int(np.ctypeslib.as_array(logits, (self._n_vocab,)).argmax())
        return int(self._lib.llama_sampler_sample(self._chain, ctx, row))

    def close(self) -> None:
        if self._chain is not None:
            self._lib.llama_sampler_free(self._chain)
            self._chain = None
