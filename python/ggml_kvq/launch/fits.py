"""Which context fits into a memory: `ggml-kvq plan`, for well-known shapes and for the user's own file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .. import budget, gguf_header, memory, methods, resolver
from ..core import llama

if TYPE_CHECKING:
    from ..evaluate.specs import CacheSpec

GIB = 1 << 30
RESERVE = GIB  # for what is neither weights nor cache nor mask: see RESERVE_WORDS
RESERVE_WORDS = "compute buffers (logits of a batch, activations), driver, display"
MEMORIES = ("8G", "12G", "24G")
MEMORIES_OF_LARGE = ("16G", "24G", "2x12G", "2x16G", "2x24G")
# Bits count at 131072 tokens. Means are counted, as models have them measured.
CACHES = (
    "f16",
    "q8_0=upstream:q8_0",
    "q4_0=upstream:q4_0",
    "auto-4.25=auto:bits=4.25,means=on",
    "auto-2.75=auto:bits=2.75,means=on",
    "auto-2.25=auto:bits=2.25,means=on",
)


@dataclass(frozen=True)
class Known:
    """A well-known model: its name and what counts of it. Weights: bytes of the usual Q4_K_M file, to 10 MB."""

    name: str
    facts: memory.Model
    header: gguf_header.Header | None = None  # of a file: what was measured of it counts


def _known(name: str, megabytes: int, n_layer: int, heads: int, size: int, n_ctx: int, window: int = 0) -> Known:
    """window: tokens that all layers see but the last of each six (Gemma 3); 0: all see everything."""
    shapes = [(il, heads, size, size) for il in range(n_layer)]
    short = [s for s in shapes if window and s[0] % 6 != 5]
    full = [s for s in shapes if s not in short]
    return Known(name, memory.Model(megabytes * 1_000_000, full, short, window, n_layer, False, n_ctx))


# Facts of the models' own configurations: layers, KV heads, head size, longest context. Qwen3 has 32768 tokens
# without YaRN and 131072 with it, as its authors describe.
KNOWN = (
    _known("Llama 3.1 8B Q4_K_M", 4920, 32, 8, 128, 131072),
    _known("Qwen3 8B Q4_K_M", 5030, 36, 8, 128, 131072),
    _known("Gemma 3 12B Q4_K_M", 7300, 48, 8, 256, 131072, window=1024),
)


# Shapes for which one card is often not enough; contexts without YaRN.
LARGE = (
    _known("Llama 3.1 8B Q8_0", 8540, 32, 8, 128, 131072),
    _known("Qwen3 32B Q4_K_M", 19760, 64, 8, 128, 40960),
    _known("Llama 3.3 70B Q4_K_M", 42520, 80, 8, 128, 131072),
)


@dataclass(frozen=True)
class Memory:
    """A memory as it was written, its bytes and how many cards have as much."""

    text: str
    n_bytes: int
    n_cards: int = 1

    def holds(self, known: Known, reserve: int) -> bool:
        """The weights and `reserve` bytes leave room on the card that holds most of the layers."""
        weights = memory.Need(0, 0, known.facts.weights)
        return memory.on_fullest(known.facts, weights, self.n_cards) + reserve < self.n_bytes


def memory_of(text: str) -> Memory:
    """ "12G", or "2x12G" for two cards. BudgetError."""
    cards = re.fullmatch(r"\s*([1-9]\d?)\s*x\s*(.*)", text)
    n_bytes = budget.size(cards[2] if cards else text, "--memory")
    return Memory(text, n_bytes, int(cards[1]) if cards else 1)


def of_file(path: Path) -> Known:
    """What counts of a GGUF file, all parts of a split one. GgufError when it keeps no KV cache."""
    header = gguf_header.read(path, tensors=True)
    header.check_whole()
    facts = memory.facts(header)
    if facts is None:
        gguf_header.attention_layers(header)  # says why
        raise gguf_header.GgufError(f"{path} describes no attention layers; give a model")
    if part := re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name):
        parts = [path.with_name(f"{part[1]}-{i:05}-of-{part[2]}.gguf") for i in range(1, int(part[2]) + 1)]
        facts = replace(facts, weights=sum(p.stat().st_size for p in parts))
    return Known(path.stem, facts, header)


def planner(spec: CacheSpec, n_layer: int, header: gguf_header.Header | None = None) -> memory.Plan:
    """Bytes of a cache: by libggml-kvq, or of llama.cpp's own types by their bits. MethodError."""
    if spec.method is not None:
        options = spec.options
        if header:
            options, _ = resolver.planned(methods.library, spec.method, options, spec.config, header)
        return memory.planner(spec.method, options, n_layer)
    k, v = (gguf_header.type_bits(llama.GGML_TYPES[kind]) for kind in (spec.type_k, spec.type_v))

    def plan(shapes: list[memory.Shape], n_cells: int, n_stream: int, _: memory.Whole = ([], 0)) -> int:
        return int(sum(heads * (k * dk + v * dv) for _, heads, dk, dv in shapes) * n_cells * n_stream / 8)

    return plan


def longest(
    known: Known, spec: CacheSpec, n_bytes: int, *, reserve: int = RESERVE, n_ubatch: int = 512, n_cards: int = 1
) -> int:
    """The longest context, in tokens, whose cache fits into n_bytes of each card beside the weights, the mask of a
    batch and `reserve`; at most what the model was trained for. 0: not even 256 tokens fit. MethodError.
    """
    plan = planner(spec, known.facts.n_layer, known.header)
    got = memory.longest(known.facts, plan, n_bytes - reserve, n_ubatch=n_ubatch, n_cards=n_cards)
    return min(got, known.facts.n_ctx_train) if known.facts.n_ctx_train else got


def words(n_ctx: int, most: int) -> str:
    """A context as in the table: whole thousands of 1024 tokens, rounded down; "all" for the model's whole one."""
    if n_ctx <= 0:
        return "-"
    text = f"{n_ctx // 1024}k" if n_ctx >= 1024 else str(n_ctx)
    return f"all {text}" if n_ctx == most else text


def table(
    models: Sequence[Known],
    memories: Sequence[Memory],
    specs: Sequence[CacheSpec],
    *,
    markdown: bool,
    reserve: int = RESERVE,
    n_ubatch: int = 512,
) -> str:
    """Contexts by model and memory, a column a cache. MethodError."""
    from ..evaluate import results

    rows = []
    for known in models:
        for m in memories:
            fit = [
                longest(known, spec, m.n_bytes, reserve=reserve, n_ubatch=n_ubatch, n_cards=m.n_cards) for spec in specs
            ]
            rows.append([f"{known.name}, {m.text}", *[words(n, known.facts.n_ctx_train) for n in fit]])
    return results.table(["model, memory", *[spec.label for spec in specs]], rows, markdown=markdown)
