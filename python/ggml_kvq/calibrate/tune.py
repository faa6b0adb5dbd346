"""Which layers deserve bits: the order in which method auto raises them, measured on a text.

D(layer, rung) is the divergence from the f16 cache when that layer stands on `rung` of method auto's ladder
(reference/auto.py) and all others on the highest one, less the divergence with all of them there. Divergences of
layers about add up, so the best mixture for any number of bits rises along the steepest remaining step,
(D(layer, rung) - D(layer, rung + n)) / bits, of the lower convex hull of each layer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .. import files as whole_files
from .. import progress
from ..errors import KvqError
from ..evaluate import perplexity
from ..model import Model
from ..reference.auto import RUNGS, WHOLE, Rung, code_bits
from . import capture, files, halves, means

MEASURED = (0, 2, 4)  # rungs; those between are interpolated: each bit divides the error by about the same factor
FAR = 131072  # tokens: where window and tables no longer count
SHOWN = (1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 3.5, 4.25)  # bits whose divergence the sidecar states
UBATCH = 128


@dataclass
class Tuned:
    """order: layers as method auto takes them; damage: D [layer][rung], nats; frontier: (true bits at FAR tokens,
    level, divergence in nats) of the mixtures; seconds that all of it took.
    """

    order: list[int]
    damage: np.ndarray
    frontier: list[tuple[float, int, float]]
    means: means.Means
    seconds: float = 0.0
    n_tokens: int = 0
    hash: str = ""
    notes: list[str] = field(default_factory=list)


def ladder(fitted: means.Means) -> tuple[Rung, ...]:
    """The rungs on which layers of such keys stand."""
    return WHOLE if fitted.pairs == "none" else RUNGS


def interpolate(measured: dict[int, float], rungs: tuple[Rung, ...] = RUNGS) -> list[float]:
    """D of every rung from those measured: geometric between them, 0 at the top; never rising."""
    floor, top = 1e-9, len(rungs) - 1
    points = sorted({**{r: max(d, floor) for r, d in measured.items()}, top: floor}.items())
    bits = [code_bits(rung) for rung in rungs]
    known = [bits[r] for r, _ in points]
    logs = np.interp(bits, known, [np.log(d) for _, d in points])
    last = points[-2][0]  # behind the last one measured the error goes on falling as it did
    out = [float(np.exp(x)) for x in logs]
    out[top] = 0.0
    for r in range(last + 1, top):
        out[r] = out[last] * (bits[top] - bits[r]) / (bits[top] - bits[last])
    for r in range(1, top + 1):
        out[r] = min(out[r], out[r - 1])
    return out


def climb(damage: np.ndarray, rungs: tuple[Rung, ...] = RUNGS) -> list[int]:
    """damage [n_layer][rungs] -> layers in the order in which they rise, each to the last rung: always the step that
    takes most divergence away per bit, looking ahead over the rungs of a layer.
    """
    bits, top = [code_bits(rung) for rung in rungs], len(rungs) - 1
    at = [0] * len(damage)
    order: list[int] = []
    while len(order) < top * len(damage):
        slopes = [
            max(((d[r] - d[to]) / (bits[to] - bits[r]) for to in range(r + 1, top + 1)), default=-1.0)
            if r < top
            else -1.0
            for d, r in zip(damage, at)
        ]
        il = int(np.argmax(slopes))
        at[il] += 1
        order.append(il)
    return order


def alone(il: int, rung: int, n_layer: int, top: int) -> dict[str, Any]:
    """Options of method auto: layer `il` on `rung`, all others on the highest, `top`."""
    others = [i for i in range(n_layer) if i != il]
    order = [*(others * top), *([il] * top)]
    return {"order": ".".join(map(str, order)), "level": top * len(others) + rung}


def fit(
    path: str | os.PathLike[str],
    text: str,
    *,
    folder: str | os.PathLike[str],
    n_windows: int = 4,
    length: int = 2048,
    n_threads: int | None = None,
    say: Callable[[str], None] = print,
) -> Tuned:
    """Tune method auto for a model on a text. `folder` keeps what is measured until remove(): a run that finds it goes
    on. KvqError for a text that is too short, or a model that method auto refuses.
    """
    started = time.monotonic()
    work = Path(folder)
    work.mkdir(parents=True, exist_ok=True)
    n_layer = len(capture.layers(path))
    seen = hashlib.sha256(text.encode()).hexdigest()
    try:
        fitted = means.fit(
            path, text, n_sequences=n_windows, length=length, n_threads=n_threads, progress=True,
            checkpoint=work / "means.npz",
        )  # fmt: skip
    except KvqError:
        with contextlib.suppress(OSError):  # it goes when there is nothing in it
            work.rmdir()
        raise
    fitted = halves.checked(path, fitted, text, n_threads)
    sidecar = work / "means.kvq.gguf"
    files.write_sidecar(sidecar, files.fields(path, fitted, 4), files.arrays(fitted))
    protocol = perplexity.Protocol(length, min(UBATCH, length // 8), 0, n_windows)
    bench = _Bench(path, sidecar, protocol, work, [seen, n_windows, length, fitted.pairs], n_threads)
    base_seconds = bench.write_base(text)
    n_runs = 1 + len(MEASURED) * n_layer + len(SHOWN)
    say(
        f"tuning: {n_runs} runs over {n_windows} x {length} tokens, about {_span(n_runs * base_seconds)} on this"
        f" machine ({len(bench.done)} done before)"
    )
    line = progress.Line(True)
    rungs = ladder(fitted)
    top = len(rungs) - 1
    least = bench.divergence({"level": top * n_layer})
    damage = np.zeros((n_layer, top + 1))
    begun = time.monotonic()
    for il in range(n_layer):
        measured = {r: bench.divergence(alone(il, r, n_layer, top)) - least for r in MEASURED}
        damage[il] = interpolate(measured, rungs)
        left = (time.monotonic() - begun) / (il + 1) * (n_layer - il - 1)
        line(f"tuning: layer {il + 1}/{n_layer}, {_span(left)} left")
    line.end()
    order = climb(damage, rungs)
    frontier = list(_frontier(bench, order, fitted.pairs))
    out = Tuned(order, damage, frontier, fitted, time.monotonic() - started, n_windows * length, seen[:16])
    return out


def _span(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


class _Bench:
    """Divergences of method auto under given options, each measured once and kept in a file."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        sidecar: Path,
        protocol: perplexity.Protocol,
        work: Path,
        key: list[Any],
        n_threads: int | None,
    ) -> None:
        self.path, self.sidecar, self.protocol, self.work, self.n_threads = path, sidecar, protocol, work, n_threads
        self.store, self.key = work / "tune.json", json.dumps([*capture.stamp(path), *key])
        self.done: dict[str, float] = {}
        with contextlib.suppress(FileNotFoundError, ValueError):
            saved = json.loads(self.store.read_text())
            self.done = saved["done"] if saved["key"] == self.key else {}
        if not self.done:
            (work / "f16.base").unlink(missing_ok=True)  # it may be another model's
        self.base: perplexity.BaseFile | None = None

    def open(self, method: str, opts: dict[str, Any]) -> Model:
        n, ub = self.protocol.n_ctx, self.protocol.n_ubatch
        config = self.sidecar if method == "auto" else "none"
        return Model(
            self.path, kv_method=method, kv_opts=opts, kv_config=config, n_ctx=n, n_batch=ub, n_ubatch=ub,
            n_threads=self.n_threads,
        )  # fmt: skip

    def write_base(self, text: str) -> float:
        """Log-probabilities of the f16 cache; returns the seconds that a run over the windows takes."""
        with self.open("upstream", {}) as model:
            windows = self.protocol.windows(perplexity.text_tokens(model, text))
            self.base = perplexity.BaseFile(self.work / "f16.base", self.protocol, windows, model.n_vocab)
            started = time.monotonic()
            if not self.base.complete():
                self.base.write(model)
            else:
                for _ in perplexity.score(model, windows[0], self.protocol):
                    pass
                return (time.monotonic() - started) * len(windows)
            return time.monotonic() - started

    def divergence(self, opts: dict[str, Any]) -> float:
        name = json.dumps(opts, sort_keys=True)
        if name not in self.done:
            assert self.base is not None
            with self.open("auto", opts) as model:
                self.done[name] = float(perplexity.divergence(model, self.base).summary()["kld_mean"])
            with whole_files.whole(self.store) as partial:
                partial.write_text(json.dumps({"key": self.key, "done": self.done}))
        return self.done[name]


def remove(folder: Path) -> None:
    """What fit() keeps in `folder`, when the sidecar is written; and the folder when nothing else lies there."""
    for name in ("tune.json", "means.kvq.gguf", "means.npz", "f16.base"):
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _frontier(bench: _Bench, order: list[int], pairs: str) -> Iterator[tuple[float, int, float]]:
    """(true bits, level, divergence) of mixtures along the order, at about the bits SHOWN."""
    shapes = capture.layers(bench.path)
    n_layer = len(shapes)
    text = ".".join(map(str, order))
    from .. import methods, native

    lib = methods.library()
    bits = [
        float(
            native.plan(
                lib, "auto", f"order={text},level={level},means=on,pairs={pairs}", shapes, FAR, n_layer_model=n_layer
            )["bits"]
        )
        for level in range(len(order) + 1)
    ]
    levels = sorted({max([i for i, b in enumerate(bits) if b <= want], default=0) for want in SHOWN})
    for level in levels:
        yield bits[level], level, bench.divergence({"order": text, "level": level})


def fields(path: str | os.PathLike[str], tuned: Tuned) -> dict[str, Any]:
    """Metadata of a tuned sidecar; its arrays are those of the means."""
    return {
        **files.fields(path, tuned.means, 4),
        "kvq.method": "auto",
        "kvq.auto.order": ".".join(map(str, tuned.order)),
        "kvq.auto.frontier": " ".join(f"{bits:.3f}:{kld:.6f}" for bits, _, kld in tuned.frontier),
        "kvq.auto.text": f"{tuned.hash}, {tuned.n_tokens} tokens",
    }


def frontier_of(fields: dict[str, Any]) -> list[tuple[float, float]]:
    """(true bits, divergence) of a tuned file, [] when it holds none. KvqError for a damaged one."""
    text = str(fields.get("kvq.auto.frontier", ""))
    try:
        return [(float(a), float(b)) for a, b in (word.split(":") for word in text.split())]
    except ValueError:
        raise KvqError(f"kvq.auto.frontier is {text!r:.60}, not bits:divergence; tune again") from None
