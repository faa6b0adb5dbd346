"""Do keys in halves of rotary pairs (reference/lattice.py) pay in this model?

They do where fast pairs matter little behind the window: in models that use them for what is near and keep content in
slow ones. That is usual, and no law. So before calibrated data say that keys may be split, a text is read with both
kinds of keys in the same bytes.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import KvqError
from ..model import Model
from ..reference.auto import RUNGS, WHOLE
from . import files
from .means import Means

LENGTH, BATCH, SINKS = 512, 64, 4  # tokens that are read, so many at once: rows of a batch see each other exactly
SCORED = 128  # predictions that count, of the second half
RUNG = 2  # of both ladders: keys of 2|2 and of 0|4 bits, values of 2 (reference/auto.py)

Logits = npt.NDArray[np.float32]


def checked(path: str | os.PathLike[str], fitted: Means, text: str, n_threads: int | None = None) -> Means:
    """`fitted`, whose keys are to be split only where that diverges less from the f16 cache than whole keys of the same
    bytes. A text that is too short to tell, and a model that method auto refuses, leave them whole.
    """
    if fitted.pairs == "none":
        return fitted
    try:
        whole, split = fitted.losses = losses(path, fitted, text, n_threads)
    except KvqError:
        whole = split = 0.0
    if not split < whole:  # nor a number
        fitted.pairs = "none"
    return fitted


def losses(path: str | os.PathLike[str], fitted: Means, text: str, n_threads: int | None = None) -> tuple[float, float]:
    """Mean KL divergence from the f16 cache with whole and with split keys, nats. KvqError for a text of fewer than
    LENGTH tokens and for a model that method auto refuses.
    """
    layers, found = len(fitted.mean), []
    with tempfile.TemporaryDirectory(prefix="kvq-halves-") as folder:
        sidecar = Path(folder) / "means.kvq.gguf"
        files.write_sidecar(sidecar, files.fields(path, fitted, SINKS), files.arrays(fitted))
        with _open(path, "upstream", "", None, n_threads) as model:
            ids = np.asarray(model.tokenize(text, add_bos=True)[:LENGTH], np.int32)
            if len(ids) < LENGTH:
                raise KvqError(f"a text of {len(ids)} tokens is too short to compare keys on; give {LENGTH}")
            exact = _logits(model, ids)
        for pairs, rungs in (("none", WHOLE), (fitted.pairs, RUNGS)):
            order = ".".join(map(str, [*range(layers)] * (len(rungs) - 1)))  # all layers on one rung
            opts = f"pairs={pairs},level={RUNG * layers},order={order}"
            with _open(path, "auto", opts, sidecar, n_threads) as model:
                found.append(divergence(exact, _logits(model, ids)))
    return found[0], found[1]


def divergence(exact: Logits, other: Logits) -> float:
    """Mean KL divergence of rows of logits, nats."""
    p, q = (_log_softmax(x) for x in (exact, other))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def _log_softmax(x: Logits) -> npt.NDArray[np.float64]:
    y = x.astype(np.float64) - x.max(-1, keepdims=True)
    return np.asarray(y - np.log(np.exp(y).sum(-1, keepdims=True)))


def _open(path: str | os.PathLike[str], method: str, opts: str, config: Path | None, n_threads: int | None) -> Model:
    return Model(
        path, kv_method=method, kv_opts=opts, kv_config=config or "none", n_ctx=LENGTH, n_batch=BATCH, n_ubatch=BATCH,
        n_threads=n_threads,
    )  # fmt: skip


def _logits(model: Model, ids: npt.NDArray[np.int32]) -> Logits:
    """Of SCORED tokens, spread over the second half."""
    wanted = np.zeros(len(ids), bool)
    wanted[len(ids) // 2 :: max(1, len(ids) // 2 // SCORED)] = True
    model.reset()
    return np.concatenate([rows.copy() for rows in model.feed(ids, outputs=wanted)])
