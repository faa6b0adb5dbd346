"""Memory as one number: `--kv-bits 2.5`, `--kv-budget 2G`, and what they are for method auto."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from . import memory
from .errors import BudgetError, MethodError

METHOD = "auto"
USUAL_BITS = 2.5  # as auto's own default
LEAST_BITS = 1.25  # below what these need a budget is refused
LONG = 131072  # tokens at which bits count (methods/auto.cpp)
_CLOSE = 0.1  # bits: levels lie no further apart than this
_MOST_RUNGS = 16  # above the number of rungs of any ladder of method auto
_LEAST = 1 << 16  # bytes: a smaller number without a unit lacks one
_GIB = 16  # a smaller number without a unit means GiB, a larger one of a cache MiB
PAIRS = "set pairs=none"  # a cure in the library's words
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def size(text: str, words: str) -> int:
    """ "2G", "1.5GiB", "800M", "123456" -> bytes; units are powers of 1024. BudgetError, `words` names the flag."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text, re.IGNORECASE)
    n = int(float(found[1]) * _UNITS[found[2].lower()]) if found else 0
    if n < 1:
        raise BudgetError(
            f"{_given(words, text)} is no size; write for example {_given(words, '2G')} or {_given(words, '800M')}"
        )
    if found and not found[2] and n < _LEAST:
        unit = "M" if "budget" in words and n >= _GIB else "G"
        raise BudgetError(
            f"{_given(words, text)} is {found[1]} bytes: write the unit, for example {_given(words, text + unit)}"
        )
    return n


def _given(words: str, value: str) -> str:
    """A value as it is given: to a flag behind it, to an argument of Python as one writes it there."""
    if words.startswith("-"):
        return f"{words} {value}"
    return f"{words}={value}" if re.fullmatch(r"[\d.]+", value) else f"{words}={value!r}"


def bits(text: str, words: str) -> float:
    """A number of bits, 0.5 to 16. BudgetError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.5 <= value <= 16:
        raise BudgetError(
            f"{_given(words, text)} is no number of bits from 0.5 to 16; write for example {_given(words, '2.5')}"
        )
    return value


@dataclass(frozen=True)
class Fit:
    """What a budget becomes: a level of method auto's ladder, the true bits that it takes, and a context in tokens
    (0: as llama.cpp chooses it).
    """

    level: int
    bits: float
    n_ctx: int
    note: str

    @property
    def option(self) -> str:
        """All caches of a model stand on one level, whatever their contexts."""
        return f"level={self.level}"


@dataclass(frozen=True)
class Context:
    """Of the program that will run: tokens (0: not given), streams, tokens of a ubatch."""

    n_ctx: int
    n_stream: int = 1
    n_ubatch: int = 512


def with_means(opts: str) -> str:
    """Options of method auto as its cache has them: a model that brings no means has them measured."""
    named = any(opt.startswith("means=") for opt in opts.split(","))
    return opts if named else ",".join(filter(None, (opts, "means=on")))


class _Ladder:
    """Method auto's ladder for these layers: bytes of a level, and what its codes are in a long context."""

    def __init__(self, facts: memory.Model, opts: str, want: Context) -> None:
        self.facts, self.opts, self.want = facts, with_means(opts), want

    def cache(self, n_ctx: int, level: int) -> int:
        """Bytes of all caches at n_ctx tokens. MethodError for a level that there is not."""
        plan = memory.planner(METHOD, f"{self.opts},level={level}", self.facts.n_layer)
        size = {"n_stream": self.want.n_stream, "n_ubatch": self.want.n_ubatch}
        return memory.need(self.facts, plan, n_ctx, **size).cache

    def values(self, n_ctx: int) -> int:
        """K and V values of all caches at n_ctx tokens."""
        size = {"n_stream": self.want.n_stream, "n_ubatch": self.want.n_ubatch}
        return memory.need(self.facts, _one_bit, n_ctx, **size).cache

    def bits(self, level: int) -> float:
        """True bits in a context of LONG tokens, where `bits` of the method count."""
        shapes = [*self.facts.full, *self.facts.windowed]
        plan = memory.planner(METHOD, f"{self.opts},level={level}", self.facts.n_layer)
        return 8 * plan(shapes, LONG, 1) / _one_bit(shapes, LONG, 1)

    def highest(self, fits: Callable[[int], bool]) -> int:
        """The highest level that fits; -1: none does."""

        def there(level: int) -> bool:
            try:
                return fits(level)
            except MethodError as e:
                if "option level=" in str(e):
                    return False
                raise

        return _highest(_MOST_RUNGS * self.facts.n_layer, there)

    def of_bits(self, bits: float) -> int:
        """The level that so many bits give; 0 where even that takes more."""
        return max(0, self.highest(lambda level: self.bits(level) <= bits))


def fit(
    facts: memory.Model,
    budget: int,
    want: Context,
    opts: str = "",
    least_bits: float = USUAL_BITS,
    most_bits: float = 16.0,
) -> Fit:
    """The most bits that `budget` bytes of all caches give at want.n_ctx tokens; without a context the model's own, or
    the longest at `least_bits` where that would take fewer. BudgetError, which names what would work, below what
    LEAST_BITS need. Means are counted unless `opts` says means=off: a model that brings none has them measured.
    """
    ladder = _Ladder(facts, opts, want)
    n_ctx = want.n_ctx or facts.n_ctx_train * want.n_stream
    if not n_ctx:
        raise BudgetError("the model does not say how long its context is: give -c with --kv-budget")
    room, floor = words(budget), ladder.of_bits(LEAST_BITS)

    def bits(n: int, level: int) -> float:
        return 8 * ladder.cache(n, level) / ladder.values(n)

    def taken(n: int, level: int, note: str) -> Fit:
        least = min(level, ladder.of_bits(most_bits)) if most_bits < 16 else level
        less = f"; {most_bits:g} are taken, as --kv-bits says" if least < level else ""
        return Fit(least, bits(n, least), 0 if want.n_ctx else n, note + less)

    level = ladder.highest(lambda level: ladder.cache(n_ctx, level) <= budget)
    if want.n_ctx:
        if level < floor:
            longest = _longest(n_ctx, want, lambda n: ladder.cache(n, floor) <= budget)
            cure = "; a shorter one does not fit either"
            if longest:
                cure = f", or the longest context for it, -c {longest}"
            raise BudgetError(
                f"{room} hold no context of {n_ctx} tokens: give at least {words(ladder.cache(n_ctx, floor))}"
                f" ({bits(n_ctx, floor):.2f} bits at these {n_ctx} tokens){cure}"
            )
        return taken(n_ctx, level, f"{room} at {n_ctx} tokens: {bits(n_ctx, level):.2f} bits")
    if level >= max(floor, ladder.of_bits(least_bits - 0.2)):
        return taken(n_ctx, level, f"{room} at the model's {n_ctx} tokens: {bits(n_ctx, level):.2f} bits")
    wanted = ladder.of_bits(least_bits)
    n_short = _longest(n_ctx, want, lambda n: ladder.cache(n, wanted) <= budget)
    if not n_short:
        n_least = memory.STEP * want.n_stream
        raise BudgetError(
            f"{room} hold no context at {least_bits:g} bits, where {n_least} tokens take"
            f" {words(ladder.cache(n_least, wanted))}: give more memory"
        )
    longest = n_ctx if level >= floor else _longest(n_ctx, want, lambda n: ladder.cache(n, floor) <= budget)
    note = f"{room}: {n_short} tokens at codes of {least_bits:g} bits ({bits(n_short, wanted):.2f} with their window)"
    more = f"; up to -c {longest} with fewer bits" if longest > n_short else ""
    return Fit(wanted, bits(n_short, wanted), n_short, note + more)


def exact(facts: memory.Model, want: Context, chosen: Fit) -> int:
    """Bytes of the f16 cache of the context that was chosen."""
    n_ctx = want.n_ctx or chosen.n_ctx
    plan = memory.planner("f16", "", facts.n_layer)
    return memory.need(facts, plan, n_ctx, n_stream=want.n_stream, n_ubatch=want.n_ubatch).cache


def refuse_bits_below_least(facts: memory.Model, opts: str, asked_by: str, pairs_cure: str) -> None:
    """BudgetError when method auto cannot do with so few bits on these layers, counted as its cache counts them, of
    the smallest context. asked_by: the flag or argument; pairs_cure: how pairs=none is written there. Other errors of
    these options are left to whoever makes the cache.
    """
    try:
        memory.planner(METHOD, with_means(opts), facts.n_layer)(facts.full or facts.windowed, memory.STEP, 1)
    except MethodError as e:
        if "bits are not possible" in str(e):
            raise BudgetError(f"{asked_by}: {e}".replace(PAIRS, pairs_cure)) from e


def beyond(facts: memory.Model, opts: str, bits: float) -> float:
    """True bits of method auto's highest level, where `bits` are more than it can take; 0 where they are not."""
    ladder = _Ladder(facts, opts, Context(0))
    top = ladder.bits(ladder.highest(lambda level: ladder.bits(level) > 0))
    return top if bits > top + _CLOSE else 0.0


def words(n_bytes: int) -> str:
    """A size, rounded up, so that it is enough when it is given back."""
    unit, name = (memory.MIB, "MiB") if n_bytes >= 10 * memory.MIB else (1024, "KiB")
    return f"{-(-n_bytes // unit)} {name}"


def _one_bit(shapes: list[memory.Shape], n_cells: int, n_stream: int, _: memory.Whole = ([], 0)) -> int:
    """Values of these layers, as memory.Plan."""
    return sum(heads * (k + v) for _, heads, k, v in shapes) * n_cells * n_stream


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
