"""Model cards: what was measured of a model that carries its own calibrated data, as Markdown beside it.

A card holds nothing that was not measured: its figures are rows of `ggml-kvq eval -o`, of the model and the data that
were embedded.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .errors import KvqError
from .evaluate import results
from .evaluate.results import Row

_BESIDE = ("f16", "upstream:q8_0", "upstream:q4_0")  # that users know

CARD = """---
base_model: {model}
library_name: llama.cpp
tags: [gguf, kv-cache, ggml-kvq]
---

# {output}

A copy of `{model}` with calibrated data of the KV cache as metadata. Its weights are unchanged, and every llama.cpp
loads it. With [ggml-kvq](https://pypi.org/project/ggml-kvq/) it keeps its cache by method **{method}** without being
asked.

| | |
|---|---|
| method | `{method}`{how} |
| calibrated on | {tokens} tokens |
| model | {arch}, {n_layer} layers, file hash {model_hash} |
| data | `{sidecar}`, hash {sidecar_hash} |

## What it costs

{figures}

{text}

Measured on {machines}, {dates}, commit {commits}. `bits` are true bits: every byte that is allocated, over the number
of cached values. KL divergence is from llama.cpp's own f16 cache on the same tokens, in nats.

## Use

    pip install ggml-kvq
    llama-cli -m {output} -p "Hello"
    llama-server -m {output} -c 32k

`--kv-method none` keeps llama.cpp's own cache.

## Repeat

{commands}
"""


def row_of(row: Row, method: str, model_hash: str, sidecar_hash: str) -> bool:
    """Whether a row measures this model on a text: by its own method and data, or by a cache to compare with."""
    key = row.get("key", {})
    if key.get("kind") != "text" or key.get("model_hash") != model_hash or "kld_mean" not in row:
        return False
    if key.get("spec") in _BESIDE or key.get("cache") == "f16":
        return True
    return row.get("method") == method and key.get("config") in (None, sidecar_hash)


def card(
    model: str | os.PathLike[str], sidecar: str | os.PathLike[str], output: str, meta: dict[str, Any], rows: list[Row]
) -> str:
    """The card of `output`, which is `model` with the data of `sidecar`; meta: kvq.* fields of the sidecar; rows: as
    `ggml-kvq eval -o` wrote them. KvqError when none of them is of this method and model.
    """
    method, model_hash = str(meta["kvq.method"]), results.fingerprint(model)
    chosen = [r for r in rows if row_of(r, method, model_hash, results.fingerprint(sidecar))]
    if not any(r["method"] == method for r in chosen):
        raise KvqError(
            f"no row of a text with {method} and {os.fspath(model)} (hash {model_hash}); measure it: ggml-kvq eval -m"
            f" {os.fspath(model)} --cache {method}@{os.fspath(sidecar)} -f TEXT -o ROWS.jsonl"
        )
    texts = {(r["key"]["text"], r["key"]["text_hash"], r["key"]["n_ctx"], r["key"]["n_ubatch"]): r for r in chosen}
    if len(texts) > 1:
        names = ", ".join(sorted(f"{t[0]} at {t[2]}" for t in texts))
        raise KvqError(f"the rows are of several texts or windows ({names}); give rows of one")
    [((text, text_hash, n_ctx, n_ubatch), one)] = texts.items()
    figures = [
        [
            str(r["key"]["cache"]),
            f"{r['bits']:.2f}",
            f"{r['bits_no_window']:.2f}",
            f"{r['ppl']:.4g}",
            f"{r['kld_mean']:.4f}",
            f"{r['kld_p99']:.3f}",
            f"{r['same_top']:.1%}",
        ]
        for r in sorted(chosen, key=lambda r: -float(r["bits"]))
    ]
    head = ["cache", "bits", "long context", "perplexity", "KLD mean", "KLD 99 %", "same top token"]
    predictor = meta.get(f"kvq.{method}.predictor")
    commands = dict.fromkeys(str(r["command"]) for r in chosen)
    return CARD.format(
        output=output,
        model=Path(model).name,
        sidecar=Path(sidecar).name,
        method=method,
        how=f", predictor {predictor}" if predictor else "",
        tokens=meta.get(f"kvq.{method}.tokens", "no"),
        arch=meta["kvq.model.arch"],
        n_layer=meta["kvq.model.n_layer"],
        model_hash=model_hash,
        sidecar_hash=results.fingerprint(sidecar),
        figures=results.table(head, figures, markdown=True),
        text=f"Text `{text}`, hash {text_hash}: {one['n_tokens']} scored tokens, window {n_ctx}, batch {n_ubatch}.",
        machines=", ".join(sorted({str(r["machine"]) for r in chosen})),
        dates=", ".join(sorted({str(r["date"])[:10] for r in chosen})),
        commits=", ".join(sorted({str(r["commit"]) for r in chosen})),
        commands="\n".join(f"    {c}" for c in commands),
    )
