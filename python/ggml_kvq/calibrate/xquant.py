"""XQuant configurations in GGUF: the preset scaled to the model, or a search over kq, vq, km, vm, eta1 and eta2 on a
text.

The search minimises the mean KL divergence from the f16 cache at the preset's code bits, one parameter after the other
(section 4.1 of the paper grids eta). Codes are shared only where that beats the null: the same layers with no codes at
all, which costs fewer bytes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..core.kvstats import UPSTREAM
from ..core.model import Model
from ..errors import KvqError
from ..evaluate import perplexity
from . import capture

PRESETS = {"1.38": (30, 2, 32, 16), "1.41": (28, 0, 32, 28), "1.16": (26, 0, 32, 0)}  # of 32 layers, methods/xquant.cpp
ETA1, ETA2 = (0.0, 1 / 6, 0.25, 1 / 3), (0.0, 0.045, 0.09)


@dataclass(frozen=True)
class Config:
    """Options of method xquant; shared: "codes", or "none" where the null is better."""

    kq: int
    vq: int
    km: int
    vm: int
    eta1: float = 1 / 6
    eta2: float = 0.045
    shared: str = "codes"
    group: int = 32
    window: int = 128

    def options(self) -> dict[str, object]:
        return {key: round(value, 8) if isinstance(value, float) else value for key, value in self.__dict__.items()}


@dataclass
class Found:
    """best; kld of every configuration tried, nats, in order."""

    best: Config
    tried: list[tuple[str, Config, float]] = field(default_factory=list)


def preset(name: str, n_layer: int) -> Config:
    """The preset's splits scaled to n_layer, pairs whole: keys round down, values up, as methods/xquant.cpp scales
    them.
    """

    def scaled(of32: int, up: bool) -> int:
        pairs = (of32 * n_layer + 63) // 64 if up else of32 * n_layer // 64
        return min(2 * pairs, n_layer + n_layer % 2)

    kq, vq, km, vm = PRESETS[name]
    return Config(scaled(kq, False), scaled(vq, True), scaled(km, False), scaled(vm, True))


def code_bits(c: Config, n_layer: int) -> float:
    """Mean code bits of a value, as the paper counts (appendix C): shared codes once; the null stores none for
    sharing layers.
    """
    total = 0
    for q, m in ((c.kq, c.km), (c.vq, c.vm)):
        total += sum(0 if il % 2 and il >= m else 2 if il < q else 1 for il in range(n_layer))
    return total / (2 * n_layer)


def search(
    model: str | os.PathLike[str],
    text: str,
    start: Config,
    *,
    n_ctx: int = 1024,
    chunks: int = 2,
    n_threads: int | None = None,
    report: Callable[[str], None] = print,
) -> Found:
    """Best configuration at the code bits of `start`. Raises KvqError for a text shorter than two windows of n_ctx, and
    for windows in which no code is read.
    """
    n_layer = len(capture.layers(model))
    protocol = perplexity.Protocol(n_ctx, min(128, n_ctx), 0, chunks)
    size: dict[str, Any] = {
        "n_ctx": n_ctx,
        "n_batch": protocol.n_ubatch,
        "n_ubatch": protocol.n_ubatch,
        "n_threads": n_threads,
    }
    with tempfile.TemporaryDirectory() as folder:
        with Model(model, UPSTREAM, **size) as m:
            base = perplexity.BaseFile(
                Path(folder) / "base", protocol, protocol.windows(perplexity.text_tokens(m, text)), m.n_vocab
            )
            base.write(m)
        found = Found(start)
        known: dict[Config, float] = {}

        def loss(what: str, c: Config) -> float:
            if c not in known:
                codes = perplexity.CodesRead()
                with Model(model, "xquant", dict(c.options()), kv_config="none", **size) as m:
                    known[c] = float(perplexity.divergence(m, base, codes=codes).summary()["kld_mean"])
                if not codes.n_read:
                    raise KvqError(
                        f"windows of {n_ctx} tokens are too short to search on: nothing is read from codes behind a"
                        f" window of {c.window}; give a --length of {4 * c.window} or more"
                    )
                found.tried.append((what, c, known[c]))
                report(
                    f"{what:<14} kq={c.kq} vq={c.vq} km={c.km} vm={c.vm} eta1={c.eta1:.4g} eta2={c.eta2:.4g}"
                    f" shared={c.shared}: KL divergence {known[c]:.5f}"
                )
            return known[c]

        best = start
        loss("preset", best)
        best = min((replace(best, eta1=v) for v in ETA1), key=lambda c: loss("eta1", c))
        best = min((replace(best, eta2=v) for v in ETA2), key=lambda c: loss("eta2", c))
        null = replace(best, shared="none")
        if min(best.km, best.vm) < n_layer and loss("null", null) <= loss("shared", best):
            best = null
        for d in (-4, -2, 2, 4):  # pairs of layers that give key bits to values, or take them
            c = replace(best, kq=best.kq - d, vq=best.vq + d)
            whole = (
                min(c.kq, c.vq) >= 0
                and max(c.kq, c.vq) <= n_layer
                and abs(code_bits(c, n_layer) - code_bits(best, n_layer)) < 1e-9
            )
            if whole and loss("bits moved", c) < loss("", best):
                best = c
        for key in ("km", "vm"):  # sharing in fewer layers, paid for with values of one bit
            for later in range(getattr(best, key) + 4, n_layer + 1, 4):
                c = replace(best, km=later) if key == "km" else replace(best, vm=later)
                while code_bits(c, n_layer) > code_bits(start, n_layer) + 1e-9 and (c.vq or c.kq > 2):
                    c = replace(c, vq=c.vq - 2) if c.vq else replace(c, kq=c.kq - 2)
                if code_bits(c, n_layer) <= code_bits(start, n_layer) + 1e-9 and loss(key, c) < loss("", best):
                    best = c
        if (
            best.shared == "codes"
            and min(best.km, best.vm) < n_layer
            and loss("null", replace(best, shared="none")) <= loss("", best)
        ):
            best = replace(best, shared="none")
        found.best = best
        return found


def fields(model: str | os.PathLike[str], c: Config) -> dict[str, Any]:
    """kvq.* metadata of a configuration."""
    from .files import VERSION, identity, sketch

    if not all(n % 2 == 0 for n in (c.kq, c.vq, c.km, c.vm)):
        raise KvqError(f"kq={c.kq} vq={c.vq} km={c.km} vm={c.vm} cut a layer pair in two; use even numbers")
    return {
        "kvq.version": VERSION,
        "kvq.method": "xquant",
        **identity(model),
        "kvq.model.sketch": sketch(model),
        **{f"kvq.xquant.{key}": value for key, value in c.options().items()},
    }
