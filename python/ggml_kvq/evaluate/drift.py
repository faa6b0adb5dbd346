"""Long generation: how far a cache drifts from f16 over thousands of freely generated tokens.

The f16 cache writes a text of n_tokens (sampled with a fixed seed, greedy text loops on small models). A cache under
test then (1) decodes the same tokens one at a time, which gives divergence and top-1 agreement by position, and (2)
generates with the same sampler and seed, which gives the number of tokens until the two texts part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import files
from . import metrics
from .perplexity import Tokens

if TYPE_CHECKING:
    from ..core.model import Model

Progress = Callable[[int], object]
N_PARTS = 8


@dataclass(frozen=True)
class DriftProtocol:
    """n_tokens generated after `prompt`; temperature, top_k and seed of both generations; n_ubatch for the prompt."""

    prompt: str
    n_tokens: int = 2048
    temperature: float = 0.8
    top_k: int = 40
    seed: int = 1
    n_ubatch: int = 512

    def key(self) -> dict[str, Any]:
        return asdict(self)


def generate_tokens(
    model: Model, protocol: DriftProtocol, progress: Progress | None = None
) -> tuple[Tokens, Tokens, Any]:
    """Generate freely: (prompt tokens, generated tokens int32 [n], packed log-probabilities uint16 [n, row_words])."""
    prompt = np.asarray(model.tokenize(protocol.prompt, add_bos=True), np.int32)
    rng = np.random.default_rng(protocol.seed)
    model.reset()
    rows, out, feed = [], [], prompt
    for _ in range(protocol.n_tokens):
        logits = _last(model, feed, protocol.n_ubatch)
        rows.append(metrics.pack(logits[None])[0])
        out.append(_sample(logits, protocol, rng))
        feed = np.asarray(out[-1:], np.int32)
        if progress:
            progress(1)
    return prompt, np.asarray(out, np.int32), np.stack(rows)


def _last(model: Model, tokens: Tokens, n_ubatch: int) -> Any:
    last = None
    for logits in model.feed(tokens, n_ubatch=n_ubatch):
        last = logits
    assert last is not None
    return last[-1]


def _sample(logits: Any, protocol: DriftProtocol, rng: np.random.Generator) -> int:
    """Inverse-CDF sampling over the top_k tokens by probability: one uniform number per token whatever the cache."""
    u = rng.random()
    if protocol.temperature == 0:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")[: protocol.top_k or None]
    p = np.exp((logits[order] - logits[order[0]]).astype(np.float64) / protocol.temperature)
    return int(order[min(len(order) - 1, int(np.searchsorted(np.cumsum(p) / p.sum(), u)))])


def write_reference(path: Path, model: Model, protocol: DriftProtocol, progress: Progress | None = None) -> None:
    """Generate with the f16 cache and store prompt, text and packed rows in `path` (npz, atomic)."""
    prompt, tokens, rows = generate_tokens(model, protocol, progress)
    with files.whole(path, need=rows.nbytes) as partial, open(partial, "wb") as f:
        np.savez(f, prompt=prompt, tokens=tokens, rows=rows)


def drift(model: Model, reference: Path, protocol: DriftProtocol, progress: Progress | None = None) -> dict[str, Any]:
    """summary() of the divergence on the reference text, kld_by_part (mean of each eighth, nats), parted_at (first
    token at which free generation differs, n_tokens when it never does).
    """
    with np.load(reference) as data:
        prompt, tokens, rows = data["prompt"], data["tokens"], data["rows"]
    out = metrics.Divergence()
    model.reset()
    feed = prompt
    for i in range(len(tokens)):
        logits = _last(model, feed, protocol.n_ubatch)
        out.add(logits[None], rows[i : i + 1], tokens[i : i + 1])
        feed = tokens[i : i + 1]
        if progress:
            progress(1)

    rng = np.random.default_rng(protocol.seed)
    model.reset()
    feed, parted = prompt, len(tokens)
    for i in range(len(tokens)):
        token = _sample(_last(model, feed, protocol.n_ubatch), protocol, rng)
        if token != tokens[i]:
            parted = i
            break
        feed = tokens[i : i + 1]
        if progress:
            progress(1)
    result = out.summary()
    result["kld_by_part"] = [float(p.mean()) for p in np.array_split(out.values(), N_PARTS)]
    result["parted_at"] = parted
    return result
