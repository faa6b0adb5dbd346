"""Memory as one number: `--kv-bits 2.5`, `--kv-budget 2G`, and what they are for method auto."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from . import memory
from .errors import BudgetError, MethodError

METHOD = "auto"
RUNGS_ABOVE = 5  # of method auto's ladder without data, behind the first: reference/auto.py
USUAL_BITS = 2.5  # as auto's own default
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def size(text: str, words: str) -> int:
    """ "2G", "1.5GiB", "800M", "123456" -> bytes; units are powers of 1024. BudgetError, `words` names the flag."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text, re.IGNORECASE)
    n = int(float(found[1]) * _UNITS[found[2].lower()]) if found else 0
    if n < 1:
        raise BudgetError(f"{words} {text} is no size; write for example {words} 2G or {words} 800M")
    return n


def bits(text: str, words: str) -> float:
    """A number of bits, 0.5 to 16. BudgetError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.5 <= value <= 16:
        raise BudgetError(f"{words} {text} is no number of bits from 0.5 to 16; write for example {words} 2.5")
    return value


@dataclass(frozen=True)
class Fit:
    """What a budget becomes: true bits and a context in tokens (0: as llama.cpp chooses it)."""

    bits: float
    n_ctx: int
    note: str


@dataclass(frozen=True)
class Context:
    """Of the program that will run: tokens (0: not given), streams, tokens of a ubatch."""

    n_ctx: int
    n_stream: int = 1
    n_ubatch: int = 512


def fit(facts: memory.Model, budget: int, want: Context, opts: str = "", least_bits: float = USUAL_BITS) -> Fit:
    """The most bits that `budget` bytes of cache give at want.n_ctx tokens; without a context the model's own, or the
    longest at `least_bits` where that would take fewer. BudgetError names what would work. Means are counted unless
    `opts` says means=off: a model that brings none has them measured.
    """
    if not any(opt.startswith("means=") for opt in opts.split(",")):
        opts = ",".join(filter(None, (opts, "means=on")))

    def cache(n_ctx: int, more: str) -> int:
        plan = memory.planner(METHOD, ",".join(filter(None, (opts, more))), facts.n_layer)
        return memory.need(facts, plan, n_ctx, n_stream=want.n_stream, n_ubatch=want.n_ubatch).cache

    top = RUNGS_ABOVE * facts.n_layer
    n_ctx = want.n_ctx or facts.n_ctx_train * want.n_stream
    if not n_ctx:
        raise BudgetError("the model does not say how long its context is: give -c with --kv-budget")
    values = memory.need(facts, _one_bit, n_ctx, n_stream=want.n_stream, n_ubatch=want.n_ubatch).cache
    words = _words(budget)

    def leads(n: int, level: int, bits: float) -> float:
        return _leading(facts, opts, want, n, level) if facts.windowed else bits

    def step(n: int, level: int) -> str:
        """A level as an option. Of several caches each finds its own, from bits."""
        return bits_option(leads(n, level, 0)) if facts.windowed else f"level={level}"

    def highest(n: int) -> int:
        """Level that fits at n tokens, -1: none does."""
        return _highest(top, lambda level: cache(n, step(n, level)) <= budget)

    level = highest(n_ctx)
    if want.n_ctx:
        if level < 0:
            longest = _longest(n_ctx, want, lambda n: cache(n, "level=0") <= budget)
            least = cache(n_ctx, "level=0")
            cure = f"or the longest context for it, -c {longest}" if longest else "no context fits it"
            raise BudgetError(
                f"{words} hold no context of {n_ctx} tokens: give at least {_words(least)}"
                f" ({8 * least / values:.2f} bits), {cure}"
            )
        got = 8 * cache(n_ctx, step(n_ctx, level)) / values
        return Fit(leads(n_ctx, level, got), 0, f"{words} at {n_ctx} tokens: {got:.2f} bits")
    got = 8 * cache(n_ctx, step(n_ctx, level)) / values if level >= 0 else 0.0
    if got >= least_bits - 0.2:
        return Fit(leads(n_ctx, level, got), n_ctx, f"{words} at the model's {n_ctx} tokens: {got:.2f} bits")
    n_short = _longest(n_ctx, want, lambda n: _within(cache, n, f"bits={least_bits}", budget))
    if not n_short:
        raise BudgetError(
            f"{words} hold no context at {least_bits:g} bits: give -c with --kv-budget for a shorter one, or more"
            " memory"
        )
    other = f"; -c {n_ctx} would take {got:.2f} bits" if got else f"; -c {n_ctx} does not fit at any bits"
    return Fit(least_bits, n_short, f"{words} at {least_bits:g} bits: {n_short} tokens{other}")


def _leading(facts: memory.Model, opts: str, want: Context, n_ctx: int, level: int) -> float:
    """Bits that lead the cache of the whole context to this level. Each of several caches takes all layers of the model
    to be as its own, so that the bits of the other one (a short cache has more) are not in its own.
    """
    n_cells, kind = memory.cells(n_ctx // want.n_stream), facts.full or facts.windowed
    alike = [(il, *kind[0][1:]) for il in range(facts.n_layer)]
    plan = memory.planner(METHOD, ",".join(filter(None, (opts, f"level={level}"))), facts.n_layer)
    return 8 * plan(alike, n_cells, want.n_stream) / _one_bit(alike, n_cells, want.n_stream)


def _words(n_bytes: int) -> str:
    """A size, rounded up, so that it is enough when it is given back."""
    unit, name = (memory.MIB, "MiB") if n_bytes >= 10 * memory.MIB else (1024, "KiB")
    return f"{-(-n_bytes // unit)} {name}"


def _one_bit(shapes: list[memory.Shape], n_cells: int, n_stream: int, _: memory.Whole = ([], 0)) -> int:
    """Values of these layers, as memory.Plan."""
    return sum(heads * (k + v) for _, heads, k, v in shapes) * n_cells * n_stream


def _within(cache: Callable[[int, str], int], n: int, opts: str, budget: int) -> bool:
    try:
        return cache(n, opts) <= budget
    except MethodError:  # too short for so few bits
        return False


def _highest(top: int, fits: Callable[[int], bool]) -> int:
    low, high = -1, top
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _longest(n_ctx: int, want: Context, fits: Callable[[int], bool]) -> int:
    """The longest context below n_ctx that fits, a multiple of 256 tokens a stream; 0: none does."""
    step = memory.STEP * want.n_stream
    return _highest(n_ctx // step, lambda i: i <= 0 or fits(i * step)) * step


def bits_option(value: float) -> str:
    """As an option of method auto: rounded up, so that a plan of exactly these bits still fits."""
    return f"bits={value + 0.0005:.3f}"
