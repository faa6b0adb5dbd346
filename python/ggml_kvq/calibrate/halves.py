"""Do keys in halves of rotary pairs (reference/lattice.py) pay in this model, and coordinates (calibrate/basis.py)?

They do where some pairs matter much more than others (order.py). That is usual, and no law. So before calibrated data
say that keys may be split, a text is read with both kinds of keys of the same code bits.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..core.model import Model
from ..errors import KvqError
from ..evaluate import metrics
from . import capture, files, ladder
from .means import Means, without_coordinates

LENGTH, BATCH, SINKS = 1024, 128, 4  # tokens that are read, so many at once: rows of a batch see each other exactly
PREFIX = "kvq-halves-"  # of a folder while keys are compared
SCORED = 128  # predictions that count, of the second half
COMPARED = 2.25  # bits at which coordinates have to pay
RUNGS = {"": 2, "k": 1, "v": 1}  # by side: keys of 2|2, 0|4 and 1|3 bits, values of 2 (reference/auto.py)

Logits = npt.NDArray[np.float32]


def checked(
    path: str | os.PathLike[str],
    fitted: Means,
    text: str,
    n_threads: int | None = None,
    tick: capture.Tick | None = None,
    folder: Path | None = None,
) -> Means:
    """`fitted`, whose keys are to be split, by speed or sorted, only where that diverges less from the f16 cache than
    whole keys of the same code bits. A text that is too short to tell, and a model that method auto refuses, leave them
    whole.

    Halves by speed may lose a twentieth more than sorted ones: they have one scale less. folder: of the caller, for a
    file while this runs.
    """
    if fitted.pairs == "none":
        return fitted
    try:
        fitted.losses = losses(path, fitted, text, n_threads, tick, folder)
    except KvqError:
        fitted.losses = {}
    good = {pairs: x * (0.95 if pairs == fitted.pairs else 1.0) for pairs, x in fitted.losses.items() if np.isfinite(x)}
    fitted.pairs = min(good, key=lambda pairs: good[pairs]) if any(good.values()) else "none"
    return fitted


def with_coordinates(
    path: str | os.PathLike[str],
    fitted: Means,
    text: str,
    n_threads: int | None = None,
    tick: capture.Tick | None = None,
) -> Means:
    """`fitted`, which has coordinates, or the same without them where these lose less at the same bits. A text that is
    too short to tell leaves them.
    """
    plain, found = without_coordinates(fitted), []
    opts: dict[str, object] = {"bits": COMPARED, "at": 131072}
    with _scratch() as inside:
        try:
            ids, exact = _exact(path, text, n_threads, tick)
            for means in (fitted, plain):
                sidecar = inside / "means.kvq.gguf"
                files.write_sidecar(sidecar, files.fields(path, means, SINKS), files.arrays(means))
                on = {"coordinates": "on"} if means is fitted else {}  # a GPU takes none unless asked
                with _open(path, "auto", opts | on, sidecar, n_threads) as model:
                    found.append(divergence(exact, _logits(model, ids, tick)))
        except KvqError:
            return fitted
    return fitted if found[0] < found[1] else plain


def losses(
    path: str | os.PathLike[str],
    fitted: Means,
    text: str,
    n_threads: int | None = None,
    tick: capture.Tick | None = None,
    folder: Path | None = None,
) -> dict[str, float]:
    """Mean KL divergence from the f16 cache, nats, with whole keys ("none"), with halves by speed (fitted.pairs) and,
    where an order is known, sorted. KvqError for a text of fewer than LENGTH tokens and for a model that method auto
    refuses.
    """
    layers, found = len(fitted.mean), {}
    with _scratch() if folder is None else contextlib.nullcontext(folder) as inside:
        sidecar = inside / "means.kvq.gguf"
        data = files.arrays(replace(fitted, pairs="sorted"))  # with the order, if there is one
        files.write_sidecar(sidecar, files.fields(path, fitted, SINKS), data)
        ids, exact = _exact(path, text, n_threads, tick)
        for pairs in ("none", fitted.pairs, *(["sorted"] if len(fitted.order) == layers else [])):
            rungs = ladder.of(pairs)
            opts = rungs.standing(layers, {riser: RUNGS[riser[1]] for riser in rungs.risers(layers)})
            with _open(path, "auto", opts, sidecar, n_threads) as model:
                found[pairs] = divergence(exact, _logits(model, ids, tick))
    return found


def _exact(
    path: str | os.PathLike[str], text: str, n_threads: int | None, tick: capture.Tick | None
) -> tuple[npt.NDArray[np.int32], Logits]:
    """Tokens that caches are compared on, and logits behind llama.cpp's f16 cache. KvqError: the text is too short."""
    with _open(path, "upstream", {}, None, n_threads) as model:
        ids = np.asarray(model.tokenize(text, add_bos=True)[:LENGTH], np.int32)
        if len(ids) < LENGTH:
            raise KvqError(f"a text of {len(ids)} tokens is too short to compare keys on; give {LENGTH}")
        return ids, _logits(model, ids, tick)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A folder of this process. Those that killed processes left are removed."""
    for old in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        pid = old.name.removeprefix(PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdigit() and not os.path.exists(f"/proc/{pid}") and old.stat().st_uid == os.getuid():
                shutil.rmtree(old)
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-") as folder:
        yield Path(folder)


def divergence(exact: Logits, other: Logits) -> float:
    """Mean KL divergence of rows of logits, nats."""
    p, q = (metrics.log_softmax(x).astype(np.float64) for x in (exact, other))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def _open(
    path: str | os.PathLike[str], method: str, opts: dict[str, object], config: Path | None, n_threads: int | None
) -> Model:
    return Model(
        path, kv_method=method, kv_opts=opts, kv_config=config or "none", n_ctx=LENGTH, n_batch=BATCH, n_ubatch=BATCH,
        n_threads=n_threads,
    )  # fmt: skip


def _logits(model: Model, ids: npt.NDArray[np.int32], tick: capture.Tick | None = None) -> Logits:
    """Of SCORED tokens, spread over the second half."""
    wanted = np.zeros(len(ids), bool)
    wanted[len(ids) // 2 :: max(1, len(ids) // 2 // SCORED)] = True
    model.reset()
    out, before = [], 0
    for rows in model.feed(ids, outputs=wanted):
        out.append(rows.copy())
        if tick:
            tick(len(model.tokens) - before)
            before = len(model.tokens)
    return np.concatenate(out)
