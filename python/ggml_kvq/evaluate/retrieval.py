"""Retrieval accuracy: greedy exact-match answers by task, length and depth of the asked fact.

A sample is right when greedy decoding of as many tokens as the answer has gives exactly the answer. Prompts are decoded
in batches of n_ubatch, the answer token by token, as in use. The mean negative log-likelihood of the answer's tokens,
each given those before it, says how far from right or wrong a cache is: it separates caches whose accuracies tie.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import KvqError
from . import metrics, tasks

if TYPE_CHECKING:
    from ..core.model import Model

N_DEPTHS = 4


@dataclass(frozen=True)
class Sample:
    """One question: text in front, exact answer, depth of the asked fact (0 start of the prompt .. 1 end; None:
    spread out).
    """

    prompt: str
    answer: str
    depth: float | None
    special: bool = False  # the prompt holds markers of a chat template


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
    elif task == "tools":
        at = prompt.find(answer.strip().partition(', "arguments"')[0])
    else:
        at = prompt.find(answer.strip())
    return at / len(prompt) if at >= 0 else None


def make_sample(
    task: str, n_tokens: int, seed: int, filler: tasks.Filler | None, count: Callable[[str], int]
) -> Sample:
    """Sample `seed` of a task with 0.93 n_tokens to n_tokens tokens, answer included. KvqError when none is so
    short.
    """
    try:
        prompt, answer = tasks.make_fit(task, n_tokens, seed, filler, count)
    except ValueError as e:
        raise KvqError(str(e)) from e
    return Sample(prompt, answer, fact_depth(task, prompt, answer))


def as_chat(model: Model, prompt: str) -> str:
    """The prompt in the model's chat template: the user says all but the last line, with which the answer begins."""
    user, _, cue = prompt.rpartition("\n")
    return model.chat_prompt([{"role": "user", "content": user}]) + cue


def score_answer(model: Model, sample: Sample, n_ubatch: int) -> tuple[bool, float]:
    """(the most likely token is the answer's at each of its tokens: what greedy decoding gives, mean -ln p of those
    tokens).
    """
    want = model.tokenize(sample.answer)
    feed = model.tokenize(sample.prompt, add_bos=True, special=sample.special)
    model.reset()
    right, nll = True, 0.0
    for token in want:
        last = None
        for logits in model.feed(feed, n_ubatch=n_ubatch):
            last = logits
        assert last is not None
        lp = metrics.log_softmax(last[-1:])[0]
        right = right and int(lp.argmax()) == token
        nll -= float(lp[token])
        feed = [token]
    return right, nll / len(want)


def run_cell(
    model: Model,
    task: str,
    n_tokens: int,
    n_samples: int,
    *,
    filler: tasks.Filler | None = None,
    n_ubatch: int = 512,
    seed: int = 0,
    chat: bool = False,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """n_samples samples (seeds seed, seed+1, ...): accuracy, its standard error, right, n, by depth quarter
    [[right, n], ...] with samples of no single place left out; answer_nll of each sample in order of seed (two
    caches: compare sample by sample), their mean and its standard error, nats a token. chat: prompts are in the model's
    chat template, whose tokens count.
    """
    room = n_tokens - (len(model.tokenize(as_chat(model, "\n"), special=True)) if chat else 0)
    right = np.zeros(n_samples, bool)
    nll = np.zeros(n_samples)
    depths = [[0, 0] for _ in range(N_DEPTHS)]
    for i in range(n_samples):
        sample = make_sample(task, room, seed + i, filler, lambda s: len(model.tokenize(s)))
        if chat:
            sample = replace(sample, prompt=as_chat(model, sample.prompt), special=True)
        right[i], nll[i] = score_answer(model, sample, n_ubatch)
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
        "answer_nll_mean": float(nll.mean()),
        "answer_nll_err": float(nll.std() / np.sqrt(max(1, n_samples - 1))),
        "answer_nll": [round(float(x), 5) for x in nll],
    }
