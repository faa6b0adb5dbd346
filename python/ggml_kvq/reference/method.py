"""What a method is: which block each layer's keys and values take, what layers share, what stays f16. One file per
method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from .codec import Codec

METHODS: dict[str, type[Method]] = {}


@dataclass(frozen=True)
class LayerShape:
    """kvq_layer_shape: layer index, KV heads, channels of a key head and of a value head."""

    il: int
    n_head_kv: int
    head_size_k: int
    head_size_v: int


@dataclass(frozen=True)
class LanePlan:
    """The keys, or the values, of one layer. shares_codes: those of the layer before it, own parameters."""

    codec: Codec
    shares_codes: bool = False


@dataclass(frozen=True)
class LayerPlan:
    """window: newest cells in f16; sinks: first cells in f16 for good; f32: attention without int8 folding;
    mean: calibrated channel means are left out; sort: keys are sorted, or in one block take the gains alone
    (calibrate/order.py);
    chain: lanes that are read through the layers before ("k" or "kv";
    "kk": values from keys alone), weights: bits of their predictors (reference/predictor.py);
    keep: share of a prompt's cells that stay, recent: of them the newest ones (0: all stay, page by page);
    far: format of the rows of a second tier ("": there is none), place: where they lie, top: cells of it that each KV
    head fetches per token, fetch: now, ahead or off, kept: rows of a KV head that stay with fetch ahead, exact: prompts
    read all of it;
    probe: share of query rows that score cells, whose scores are divided by the rows that see them when normalise."""

    k: LanePlan
    v: LanePlan
    window: int = 128
    sinks: int = 0
    f32: bool = False
    mean: bool = False
    sort: bool = False
    chain: str = ""
    weights: int = 8
    keep: float = 0.0
    recent: float = 0.0
    probe: float = 0.0
    normalise: bool = True
    far: str = ""
    place: str = "host"
    top: int = 0
    fetch: str = "off"
    kept: int = 0
    exact: bool = False


class Method:
    """A method with its options set. `options` maps every key to its default; the type of the default is the
    option's type.
    """

    name: ClassVar[str]
    options: ClassVar[dict[str, Any]]

    def __init__(self, **options: Any) -> None:
        for key in options:
            if key not in self.options:
                raise ValueError(f"method {self.name} has no option {key!r}: it has {', '.join(self.options)}")
        if options.get("window") == "auto":
            raise ValueError("window=auto is a matter of the library's memory: the definition takes a number")
        self.given = frozenset(options)
        self.o: dict[str, Any] = {**self.options, **options}

    def plan(self, ordinal: int, n_layer: int, shape: LayerShape, prev: LayerShape | None) -> LayerPlan:
        """ordinal: of the layer in its cache; n_layer: of the model; prev: the layer before it in the cache."""
        raise NotImplementedError

    def plans(self, shapes: list[LayerShape], n_layer: int | None = None) -> list[LayerPlan]:
        """plan() of every layer of a cache."""
        return [self.plan(i, n_layer or len(shapes), s, shapes[i - 1] if i else None) for i, s in enumerate(shapes)]


def register(cls: type[Method]) -> type[Method]:
    """Class decorator: one entry per row of methods.inc."""
    METHODS[cls.name] = cls
    return cls


#: Options of every method that quantises, as KVQ_OPTIONS_AFFINE in methods/method.h.
AFFINE_OPTIONS: dict[str, Any] = {
    "group": 32,
    "group_v": 0,
    "window": 128,
    "sinks": 0,
    "scales": "f16",
    "precision": "int8",
    "state": "rows",
    "place": "device",
}
