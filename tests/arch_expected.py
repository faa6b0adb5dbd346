"""What the architecture matrix has to give: bounds of what runs, and what does not run, with the reason.

An architecture that is in neither way accounted for is a failure, so that a newer llama.cpp cannot bring one unseen.
"""

from __future__ import annotations

from collections.abc import Sequence

from arch_matrix import METHODS, Row

# NMSE of the logits of 400 tokens. Models of random weights have no outliers to lose; what the bounds tell apart is a
# cache that is read wrongly (NMSE near 1) or at fewer bits (a bit less is a factor of 4).
LIMITS = dict(zip(METHODS, (1e-4, 5e-3, 1e-2, 5e-3, 1e-2)))

# Attention of these is sharp, which shows what quantisation changes: ten times the bounds, not for f16.
SHARP = {
    "gemma4": "queries are not scaled: logits are 8 times as large",
    "graniteswitch": "a layer that routes between adapters turns small changes into large ones",
}

# llama.cpp itself does not run these models: part of the reason that it gives.
NO_MODEL = {
    "clip": "CLIP cannot be used as main model",
    "gptj": "unsupported model architecture: 'gptj'",
    "plm": "GGML_ASSERT(a->ne[0] == b->ne[0])",  # its values have no heads when they are stored
    "rwkv6qwen2": "exit code -11",  # its graph takes the presence of an optional tensor for another architecture
    "wavtokenizer-dec": "wavtokenizer-dec.features_length",  # a vocoder, which keeps no cache
    "eagle3": "EAGLE3 model requires",  # drafts for another model, in whose context they run
    "dflash": "DFlash model requires",
    "gemma4-assistant": "GGML_ASSERT(buft != nullptr)",
}

# The same on CUDA, where llama.cpp's own cache is the reference.
NO_MODEL_CUDA = {"gemma2": "CUDA error"}  # in llama.cpp's attention, with a random model of these heads

# Refused, with a line of ours; with a method: by this one alone.
LATENT = [
    "deepseek2",
    "deepseek32",
    "glm-dsa",
    "bailingmoe3",
    "dots3note",
    "hy_v4",
    "mistral4",
    "kimi-linear",
    "kimi-k3",
    "glm5-next",
]
REFUSED = {
    **{
        f"{arch} {method}": f"multi-head latent attention, which method {method} cannot hold"
        for arch in LATENT
        for method in ("aqua", "specache")
    },
    "deepseek4": "keeps keys without values",  # compressed keys that are read as values in a way of their own
    "minimax-m3": "without flash attention (rows of the cells that an indexer picks are gathered)",
    "grok": "without flash attention (its attention logits go through tanh)",
    "t5": "without flash attention (its attention logits have a bias",
}

# Nothing of these is in a cache that attention reads: every method gives what llama.cpp's own cache gives.
UNTOUCHED = {
    **dict.fromkeys(
        ["bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert"],
        "no cache",
    ),
    **dict.fromkeys(["gemma-embedding", "t5encoder", "dream", "llada", "llada-moe", "rnd1"], "no cache"),
    **dict.fromkeys(["mamba", "mamba2", "rwkv6", "rwkv7", "arwkv7"], "recurrent states alone"),
    "llama-embed": "a cache that its attention does not read",
}

# Models with M-RoPE in whose text an image can be.
IMAGES = ("qwen2vl", "qwen3vl", "qwen3vlmoe", "glm4", "glm4moe", "hunyuan_vl", "paddleocr")


def problem(row: Row) -> str:
    """What is not as it should be; "" when nothing is."""
    expected = NO_MODEL.get(row.arch)
    if expected is not None:
        alone = row.kind == "failed" and row.reason.startswith("llama.cpp alone: ") and expected in row.reason
        return "" if alone else f"is listed as: llama.cpp alone fails with {expected!r}"
    on_cuda = NO_MODEL_CUDA.get(row.arch)
    if on_cuda and row.kind == "failed" and row.reason.startswith("llama.cpp alone: ") and on_cuda in row.reason:
        return ""
    expected = REFUSED.get(f"{row.arch} {row.method.split(':')[0]}", REFUSED.get(row.arch))
    if expected is not None:
        return "" if row.kind == "refused" and expected in row.reason else f"is listed as: refused with {expected!r}"
    if row.kind != "nmse":
        return "is neither run nor listed"
    if row.nmse == 0.0 and row.method != "f16" and row.arch not in UNTOUCHED:
        return "is what llama.cpp's own cache gives: the method was not used"
    limit = LIMITS[row.method] * (10 if row.arch in SHARP and row.method != "f16" else 1)
    return "" if row.nmse <= limit else f"is above {limit:g}"


def report(rows: Sequence[Row]) -> list[str]:
    """Prints the table and its worst rows; returns the rows that are not as they should be."""
    for method in dict.fromkeys(r.method for r in rows):
        run = [r for r in rows if r.method == method and r.kind == "nmse"]
        if run:
            worst = max(run, key=lambda r: r.nmse)
            print(f"{method:<28} {len(run)} architectures, worst {worst.arch} {worst.nmse:.2e}")
    bad = [f"{row}   <- {why}" for row in rows if (why := problem(row))]
    exact = {row.arch: row.nmse for row in rows if row.method == "f16" and row.arch not in UNTOUCHED}
    for row in rows:
        if row.method != "f16" and row.nmse == exact.get(row.arch):
            bad.append(f"{row}   <- is what f16 gives: no codes were read")
    print("\n".join(bad))
    return bad
