"""Retrieval accuracy: greedy exact-match answers by task, length and depth of the asked fact.

A sample is right when greedy decoding of as many tokens as the answer has gives exactly the answer. Prompts are decoded
in batches of n_ubatch, the answer token by token, as in use.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import tasks

if TYPE_CHECKING:
    from ..model import Model

N_DEPTHS = 4


@dataclass(frozen=True)
class Sample:
    """One question: text in front, exact answer, depth of the asked fact (0 start of the prompt .. 1 end; None: spread out)."""

    prompt: str
    answer: str
    depth: float | None


def fact_depth(task: str, prompt: str, answer: str) -> float | None:
    """Where the asked fact stands in the prompt, 0..1; None for tasks whose answer has no single place."""
    if task in ("vartrack", "count"):
        return None
    question = prompt.rfind("\n")
    if task == "fewshot":
        word = re.search(r"word: (\w+) label:$", prompt)
        at = prompt.rfind(f"word: {word.group(1)} label:", 0, question) if word else -1
    elif task == "copy":
        cue = prompt[prompt.rfind("Continue: ") + len("Continue: ") :]
        at = prompt.find(cue + answer)
    else:
        at = prompt.find(answer.strip())
    return at / len(prompt) if at >= 0 else None


def make_sample(task: str, n_tokens: int, seed: int, filler: tasks.Filler | None, count: Callable[[str], int]) -> Sample:
    """Sample `seed` of a task with 0.93 n_tokens to n_tokens tokens, answer included."""
    prompt, answer = tasks.make_fit(task, n_tokens, seed, filler, count)
    return Sample(prompt, answer, fact_depth(task, prompt, answer))


def answer_is_right(model: Model, sample: Sample, n_ubatch: int) -> bool:
    """Greedy decode; stops at the first wrong token."""
    want = model.tokenize(sample.answer)
    feed = model.tokenize(sample.prompt, add_bos=True)
    model.reset()
    for token in want:
        last = None
        for logits in model.feed(feed, n_ubatch=n_ubatch):
            last = logits
        assert last is not None
        if int(last[-1].argmax()) != token:
            return False
        feed = [token]
    return True


def run_cell(
    model: Model,
    task: str,
    n_tokens: int,
    n_samples: int,
    *,
    filler: tasks.Filler | None = None,
    n_ubatch: int = 512,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """Accuracy of n_samples samples (seeds seed, seed+1, ...): accuracy, its standard error, right, n, and by depth quarter
    [[right, n], ...] with samples of no single place left out."""
    right = np.zeros(n_samples, bool)
    depths = [[0, 0] for _ in range(N_DEPTHS)]
    for i in range(n_samples):
        sample = make_sample(task, n_tokens, seed + i, filler, lambda s: len(model.tokenize(s)))
        right[i] = answer_is_right(model, sample, n_ubatch)
        if sample.depth is not None:
            cell = depths[min(N_DEPTHS - 1, int(sample.depth * N_DEPTHS))]
            cell[0] += int(right[i])
            cell[1] += 1
        if progress:
            progress(1)
    p = float(right.mean())
    return {
        "accuracy": p,
        "accuracy_err": float(np.sqrt(p * (1 - p) / n_samples)),
        "right": int(right.sum()),
        "n": n_samples,
        "by_depth": depths,
    }
