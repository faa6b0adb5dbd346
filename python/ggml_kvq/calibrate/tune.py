"""Which layers deserve bits: the order in which method auto raises them, measured on a text.

What rises is a layer, or the keys or the values of one (ladder.py). Each is measured alone, on a few rungs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import files as whole_files
from .. import progress
from ..core.model import Model
from ..errors import KvqError
from ..evaluate import perplexity
from . import capture, files, halves, ladder, means
from .ladder import Riser

#: Rungs by side; those between are interpolated: each bit divides the error by about the same factor.
MEASURED = {"": (0, 2, 4), "k": (0, 2), "v": (0, 1)}
FAR = 131072  # tokens: where window and tables no longer count
SHOWN = (1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 3.5, 4.25)  # bits whose divergence the sidecar states
UBATCH = 128


@dataclass
class Tuned:
    """order: option `order` of method auto; damage: D by riser and rung, nats; frontier: (true bits at FAR tokens,
    level, divergence in nats) of the mixtures; seconds that all of it took.
    """

    order: str
    damage: dict[Riser, list[float]]
    frontier: list[tuple[float, int, float]]
    means: means.Means
    seconds: float = 0.0
    n_tokens: int = 0
    hash: str = ""
    notes: list[str] = field(default_factory=list)


def interpolate(measured: dict[int, float], bits: Sequence[float]) -> list[float]:
    """D of every rung from those measured, bits: of the rungs. Geometric between them, 0 at the top; never rising."""
    floor, top = 1e-9, len(bits) - 1
    points = sorted({**{r: max(d, floor) for r, d in measured.items()}, top: floor}.items())
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
    fitted = _chosen_once(work, [*capture.stamp(path), seen, n_windows, length], path, fitted, text, n_threads)
    sidecar = work / "means.kvq.gguf"
    files.write_sidecar(sidecar, files.fields(path, fitted, 4), files.arrays(fitted))
    protocol = perplexity.Protocol(length, min(UBATCH, length // 8), 0, n_windows)
    bench = _Bench(path, sidecar, protocol, work, [seen, n_windows, length, fitted.pairs], n_threads)
    base_seconds = bench.write_base(text)
    rungs = ladder.of(fitted.pairs)
    risers = rungs.risers(n_layer)
    n_runs = 1 + sum(len(MEASURED[side]) for _, side in risers) + len(SHOWN)
    before, rest = len(bench.done), max(0, n_runs - len(bench.done))
    say(
        f"tuning: {n_runs} runs over {n_windows} x {length} tokens ({before} done before), about"
        f" {progress.span(rest * base_seconds)} on this machine"
    )
    line = progress.Line(True)
    least = bench.divergence(rungs.standing(n_layer, {}))
    damage: dict[Riser, list[float]] = {}
    for i, riser in enumerate(risers):
        found = {r: bench.divergence(rungs.standing(n_layer, {riser: r})) - least for r in MEASURED[riser[1]]}
        damage[riser] = interpolate(found, rungs.bits[riser[1]])
        each = bench.seconds / bench.n_runs if bench.n_runs else base_seconds  # those of this start alone
        left = progress.span(max(0, n_runs - len(bench.done)) * each)
        line(f"tuning: {i + 1}/{len(risers)}, about {left} left")
    line.end()
    order = rungs.text(ladder.climb(damage, rungs))
    frontier = list(_frontier(bench, order, fitted.pairs))
    out = Tuned(order, damage, frontier, fitted, time.monotonic() - started, n_windows * length, seen[:16])
    return out


def _chosen_once(
    work: Path, key: list[Any], path: str | os.PathLike[str], fitted: means.Means, text: str, n_threads: int | None
) -> means.Means:
    """halves.checked(), once in `work`: where two kinds of halves are about equal, another number of threads chooses
    the other one, and what was measured with the first would be lost.
    """
    store = work / "halves.json"
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        saved = json.loads(store.read_text())
        if saved["key"] == json.loads(json.dumps(key)):
            return replace(fitted, pairs=str(saved["pairs"]))
    fitted = halves.checked(path, fitted, text, n_threads, folder=work)
    with whole_files.whole(store) as partial:
        partial.write_text(json.dumps({"key": key, "pairs": fitted.pairs}))
    return fitted


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
        self.n_runs, self.seconds = 0, 0.0  # of this process

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
            started = time.monotonic()
            with self.open("auto", opts) as model:
                self.done[name] = float(perplexity.divergence(model, self.base).summary()["kld_mean"])
            self.n_runs, self.seconds = self.n_runs + 1, self.seconds + time.monotonic() - started
            with whole_files.whole(self.store) as partial:
                partial.write_text(json.dumps({"key": self.key, "done": self.done}))
        return self.done[name]


def remove(folder: Path) -> None:
    """What fit() keeps in `folder`, when the sidecar is written; and the folder when nothing else lies there."""
    for name in ("tune.json", "halves.json", "means.kvq.gguf", "means.npz", "f16.base"):
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _frontier(bench: _Bench, order: str, pairs: str) -> Iterator[tuple[float, int, float]]:
    """(true bits, level, divergence) of mixtures along the order, at about the bits SHOWN."""
    shapes = capture.layers(bench.path)
    n_layer = len(shapes)
    from .. import methods
    from ..core import native

    lib = methods.library()
    bits = [
        float(
            native.plan(
                lib, "auto", f"order={order},level={level},means=on,pairs={pairs}", shapes, FAR, n_layer_model=n_layer
            )["bits"]
        )
        for level in range(order.count(".") + 2)
    ]
    levels = sorted({max([i for i, b in enumerate(bits) if b <= want], default=0) for want in SHOWN})
    for level in levels:
        yield bits[level], level, bench.divergence({"order": order, "level": level})


def fields(path: str | os.PathLike[str], tuned: Tuned) -> dict[str, Any]:
    """Metadata of a tuned sidecar; its arrays are those of the means."""
    return {
        **files.fields(path, tuned.means, 4),
        "kvq.method": "auto",
        "kvq.auto.order": tuned.order,
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
