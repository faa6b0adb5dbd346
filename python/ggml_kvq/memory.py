"""What a context needs and what the machine has: the answer before a program starts.

Without it llama.cpp moves layers off the device that compresses them, or the machine swaps.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from . import gguf_header

MIB = 1 << 20
STEP = 256  # llama.cpp pads a context to this many tokens
MOST = (1 << 31) - STEP  # tokens, as llama.cpp counts them
Shape = tuple[int, int, int, int]  # layer, KV heads, K head size, V head size


def available() -> int:
    """Bytes that this process may still take: MemAvailable, less when a control group allows less."""
    free = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    return min([free, *_group_rooms()]) if free else 0


def _group_rooms() -> list[int]:
    """Room in the memory control groups of this process (version 2 or 1), and those above them, that have a limit."""
    out: list[int] = []
    for line in _text("/proc/self/cgroup").splitlines():  # 0::/GROUP, or of version 1 4:memory:/GROUP
        number, controllers, group = line.split(":", 2)
        if number == "0":
            root, limit, used, files = "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif controllers == "memory":
            root, limit, used, files = (
                "/sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        for folder in {Path(root), *(Path(root + str(x)) for x in (Path(group), *Path(group).parents))}:
            most, now = _text(folder / limit).strip(), _text(folder / used).strip()
            cached = dict(x.split() for x in _text(folder / "memory.stat").splitlines()).get(files, "0")
            if most.isdigit() and now.isdigit() and int(most) < 1 << 60:
                out.append(max(0, int(most) - int(now) + int(cached)))
    return out


def _text(path: str | Path) -> str:
    """What a file of the system says, "" where it is not there."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


@dataclass(frozen=True)
class Model:
    """What counts of a model: weights (bytes of its file), layers that see the whole context or a window of it, each
    with its number among those that have attention.
    """

    weights: int
    full: list[Shape]
    windowed: list[Shape]
    window: int
    n_layer: int  # that have attention: presets are scaled to them
    latent: bool  # one row a token serves as keys and values
    n_ctx_train: int


def model(path: str | os.PathLike[str]) -> Model | None:
    """Facts of a GGUF file; None when it describes no attention cache."""
    return facts(gguf_header.read(path, tensors=True))


def facts(header: gguf_header.Header) -> Model | None:
    """Facts of a GGUF; None when it describes no attention cache."""
    try:
        shapes = gguf_header.attention_layers(header)
    except gguf_header.GgufError:
        return None
    arch = header.fields["general.architecture"]

    def get(key: str) -> int:
        value = header.fields.get(f"{arch}.{key}", 0)
        return value if isinstance(value, int) else 0

    n_layer = max(1, len(shapes) - get("nextn_predict_layers"))
    shapes = shapes[: max(1, len(shapes) - get("nextn_predict_layers") - get("attention.shared_kv_layers"))]
    window, layers = gguf_header.window(header)
    if layers is None:  # a rule that is not known here: count what any of them keeps whole, one layer of six
        layers = {s[0] for s in shapes if s[0] % 6 != 5}
    full: list[Shape] = []
    windowed: list[Shape] = []
    for number, (il, heads, k, v) in enumerate(shapes):
        (windowed if il in layers else full).append((number, heads, k, v))
    latent = f"{arch}.attention.key_length_mla" in header.fields
    return Model(os.path.getsize(header.path), full, windowed, window, n_layer, latent, get("context_length"))


def with_whole_windows(facts: Model) -> Model:
    """As Model and --swa-full keep them: every layer holds the whole context."""
    return replace(facts, window=MOST)


Whole = tuple[list[Shape], int]  # layers that see the whole context, and cells of their cache


class Plan(Protocol):
    """Bytes of the caches of these layers, n_cells tokens a stream; whole: beside layers with a sliding window."""

    def __call__(self, shapes: list[Shape], n_cells: int, n_stream: int, whole: Whole = ([], 0), /) -> int: ...


def planner(method: str, opts: str, n_layer: int) -> Plan:
    """Bytes as libggml-kvq will allocate them. MethodError when the method refuses the layers."""
    from . import methods
    from .core import kvstats, native

    # far rows take the same memory; those of a file, which specache's option place names, do not
    on_host = method != "specache" or kvstats.option(opts, "place") in ("", "host")

    def plan(shapes: list[Shape], n_cells: int, n_stream: int, whole: Whole = ([], 0)) -> int:
        size: dict[str, Any] = {"n_layer_model": n_layer, "n_stream": n_stream, "whole": whole}
        s = native.plan(methods.library(), method, opts, shapes, n_cells, **size)
        return int(s["bytes_total"]) + on_host * kvstats.bytes_besides(s)

    return plan


@dataclass(frozen=True)
class Need:
    """Bytes of a context: cache, the attention mask of one ubatch, weights."""

    cache: int
    mask: int
    weights: int

    @property
    def total(self) -> int:
        return self.cache + self.mask + self.weights

    def words(self) -> str:
        return f"{_mib(self.total)} (cache {_mib(self.cache)}, mask {_mib(self.mask)}, weights {_mib(self.weights)})"


def _mib(n: int) -> str:
    return f"{n / MIB:.0f} MiB"


def cells(n_ctx: int) -> int:
    """Cells that llama.cpp makes for a stream of so many tokens."""
    return min(MOST, -(-max(1, n_ctx) // STEP) * STEP)


def need(m: Model, plan: Plan, n_ctx: int, *, n_stream: int = 1, n_ubatch: int = 512) -> Need:
    """Bytes that n_ctx tokens take, split evenly over n_stream streams."""
    n_cells = cells(n_ctx // n_stream)
    cache = plan(m.full, n_cells, n_stream) if m.full else 0
    if m.windowed:
        cache += plan(m.windowed, min(n_cells, cells(m.window + n_ubatch)), n_stream, (m.full, n_cells))
    return Need(cache // 2 if m.latent else cache, n_cells * n_stream * n_ubatch * 2 // n_stream, m.weights)


def on_fullest(m: Model, x: Need, n_cards: int) -> int:
    """Bytes on the card that holds most, of cards that share a model's layers evenly (-sm layer; the output counts as
    a layer, and has no cache). Every card has a mask of its own.
    """
    n = m.n_layer + 1
    most = -(-n // n_cards)
    return math.ceil(x.weights * most / n + x.cache * min(most, m.n_layer) / m.n_layer) + x.mask


def longest(m: Model, plan: Plan, free: int, *, n_stream: int = 1, n_ubatch: int = 512, n_cards: int = 1) -> int:
    """The longest context (tokens, a multiple of 256 a stream) that takes at most `free` bytes of each of n_cards
    cards; 0 when none does.
    """
    step = STEP * n_stream
    low, high = 0, MOST // step
    while low < high:
        mid = (low + high + 1) // 2
        if on_fullest(m, need(m, plan, mid * step, n_stream=n_stream, n_ubatch=n_ubatch), n_cards) <= free:
            low = mid
        else:
            high = mid - 1
    return low * step


def tokens(text: str) -> int:
    """ "32768", "32k", "1.5M" -> tokens. k is 1024, M its square. ValueError for anything else."""
    text = text.strip()
    factor = {"k": 1 << 10, "m": 1 << 20}.get(text[-1:].lower(), 1)
    number = text[:-1] if factor > 1 else text
    value = float(number) if factor > 1 else int(number)
    if not 0 <= value * factor < 1 << 62 or value * factor != int(value * factor):
        raise ValueError(text)
    return int(value * factor)
