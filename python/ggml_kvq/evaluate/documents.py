"""Long documents of the user's own: LongBench-style JSONL and RULER-style JSONL from a local path.

LongBench rows: {"context", "input", "answers": [...], "dataset"?}; score = best token F1 over the answers (its
qa_f1_score). RULER rows: {"input", "outputs": [...]}; score = share of the outputs found in the answer (its
string_match_all). Documents longer than the context are cut in the middle, as LongBench does.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import KvqError

if TYPE_CHECKING:
    from ..core.model import Model

FORMATS = ("longbench", "ruler")
TEMPLATE = "{context}\n\nQuestion: {input}\nAnswer:"


@dataclass(frozen=True)
class Document:
    """A prompt and its accepted answers."""

    prompt: str
    answers: tuple[str, ...]
    dataset: str


def normalize(text: str) -> str:
    """Lower case, no punctuation, no English articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def token_f1(prediction: str, answer: str) -> float:
    """F1 of the words two texts share, after normalize(): 0..1."""
    a, b = normalize(prediction).split(), normalize(answer).split()
    common = sum((Counter(a) & Counter(b)).values())
    return 2 * common / (len(a) + len(b)) if common else 0.0


def score(kind: str, prediction: str, answers: tuple[str, ...]) -> float:
    """0..1 by the format's own measure (module docstring)."""
    if kind == "ruler":
        low = prediction.lower()
        return sum(a.lower() in low for a in answers) / len(answers)
    return max(token_f1(prediction, a) for a in answers)


def detect(row: dict[str, Any]) -> str:
    """Format of one row by its keys; KvqError when it is neither."""
    if {"input", "outputs"} <= set(row):
        return "ruler"
    if {"context", "input", "answers"} <= set(row):
        return "longbench"
    raise KvqError(
        f"row with keys {', '.join(sorted(row))} is neither LongBench (context, input, answers) nor RULER (input,"
        " outputs)"
    )


def read(path: str | Path, kind: str | None = None, template: str = TEMPLATE) -> Iterator[tuple[str, Document]]:
    """(format, Document) of every line of a JSONL file, or of every *.jsonl of a folder. Errors name file and line;
    files without a document are one too.
    """
    root = Path(path)
    files = sorted(root.glob("**/*.jsonl")) if root.is_dir() else [root]
    if not files or not files[0].is_file():
        raise KvqError(f"{root} holds no .jsonl file; give a LongBench- or RULER-style file or folder")
    empty = True
    for file in files:
        with open(file, encoding="utf-8") as f:
            for number, line in enumerate(f, 1):
                if not line.strip():
                    continue
                empty = False
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as e:
                    raise KvqError(f"{file}:{number} is no JSON ({e.msg}); one object per line is expected") from e
                form = kind or detect(row)
                try:
                    if form == "ruler":
                        outputs = row["outputs"] if isinstance(row["outputs"], list) else [row["outputs"]]
                        yield form, Document(row["input"], tuple(map(str, outputs)), row.get("task", file.stem))
                    else:
                        prompt = template.format(context=row["context"], input=row["input"])
                        yield form, Document(prompt, tuple(map(str, row["answers"])), row.get("dataset", file.stem))
                except KeyError as e:
                    raise KvqError(f"{file}:{number} lacks the key {e.args[0]!r} of the {form} format") from e
    if empty:
        raise KvqError(f"{root} holds no document; give a LongBench- or RULER-style file or folder")


def cut_middle(tokens: list[int], limit: int) -> list[int]:
    """The first and last halves of a token list that is longer than `limit`."""
    if len(tokens) <= limit:
        return tokens
    return tokens[: limit - limit // 2] + tokens[len(tokens) - limit // 2 :]


def run(
    model: Model,
    documents: list[tuple[str, Document]],
    *,
    max_tokens: int = 64,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """Greedy answers to all documents: score (mean, 0..1), n, n_cut (documents shortened), by_dataset {name: [mean,
    n]}.
    """
    scores: dict[str, list[float]] = {}
    n_cut = 0
    for kind, doc in documents:
        ids = model.tokenize(doc.prompt, add_bos=True)
        short = cut_middle(ids, model.n_ctx - max_tokens)
        n_cut += len(short) < len(ids)
        text = "".join(model.generate(short, max_tokens=max_tokens, temperature=0, stop="\n\n"))
        scores.setdefault(doc.dataset, []).append(score(kind, text, doc.answers))
        if progress:
            progress(1)
    every = [s for part in scores.values() for s in part]
    return {
        "score": float(np.mean(every)) if every else 0.0,
        "n": len(every),
        "n_cut": n_cut,
        "by_dataset": {k: [float(np.mean(v)), len(v)] for k, v in scores.items()},
    }
