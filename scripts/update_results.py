#!/usr/bin/env python3
"""Redraw docs/img and docs/results.md from the committed result files, and the tables between their markers.

    python scripts/update_results.py            (--check: exit 1 when something committed differs from what the files
    say)

The pretrained models come first: rows of scripts/real_models.py, results/real-MODEL.jsonl. README.md, docs/index.md and
docs/comparison.md take their table between `<!-- real -->` and `<!-- /real -->`, once all models have all rows.
README.md and docs/fits.md take what `ggml-kvq plan --markdown` prints between `<!-- fits -->` and `<!-- /fits -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from pathlib import Path

from ggml_kvq import bench, plotting
from ggml_kvq.evaluate import results
from ggml_kvq.evaluate.specs import parse
from ggml_kvq.launch import fits

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import real_tables  # noqa: E402

#: rows on a text that the figure leaves out, so that its labels can be read
NOT_DRAWN = ("auto-1.5", "auto-2", "xquant-1.38-null", "kivi-2-g16", "aqua-bias-k3v2", "aqua-full-1")  # fmt: skip
#: more files: heading, name, words
MORE_TEXTS = (
    ("Windows of 4096 tokens", "window4k-*.jsonl", ""),
    (
        "Batches of 16 tokens",
        "ubatch16-*.jsonl",
        " Divergence is from f16 in batches of 128: with few rows llama.cpp's attention on a CPU adds f16 values up in"
        " f16, which alone is the divergence of the row `f16` and a part of that of the simulated one. Fewer exact"
        " tokens of the own batch are seen than above.",
    ),
)
MEMORY_CACHES = [
    "f16",
    "upstream:q8_0",
    "upstream:q4_0",
    "kivi-4=kivi:bits=4",
    "kivi-2=kivi:bits=2",
    "xquant-1.38=xquant",
]
MEMORY_LENGTHS = [2048, 8192, 32768, 131072]


def text_table(rows: list[results.Row]) -> str:
    """Damage on the text by falling true bits; long-context bits beside them."""
    chosen = sorted((r for r in rows if r["key"]["kind"] == "text" and "kld_mean" in r), key=lambda r: -r["bits"])
    return results.table(
        ["cache", "bits", "long context", "PPL", "KLD mean", "KLD 99 %", "same top token"],
        [
            [
                r["key"]["cache"],
                f"{r['bits']:.2f}",
                f"{r['bits_no_window']:.2f}",
                f"{r['ppl']:.3f}",
                f"{r['kld_mean']:.4f}",
                f"{r['kld_p99']:.3f}",
                f"{100 * r['same_top']:.1f} %",
            ]
            for r in chosen
        ],
        markdown=True,
    )


def retrieval_tables(rows: list[results.Row]) -> list[str]:
    """Exact answers by cache and task, a table a length."""
    cells = [r for r in rows if r["key"]["kind"] == "retrieval" and "accuracy" in r]
    tasks = sorted({r["key"]["task"] for r in cells})
    out = []
    for length in sorted({r["key"]["n_tokens"] for r in cells}):
        here = [r for r in cells if r["key"]["n_tokens"] == length]
        by = {(r["key"]["cache"], r["key"]["task"]): f"{r['right']}/{r['n']}" for r in here}
        caches = dict.fromkeys(r["key"]["cache"] for r in sorted(here, key=lambda r: -r["bits"]))
        out += [
            f"Prompts of {length} tokens:",
            results.table(
                ["exact answers", *tasks], [[c, *[by.get((c, t), "") for t in tasks]] for c in caches], markdown=True
            ),
        ]
    return out


def drift_table(rows: list[results.Row]) -> str:
    """Divergence along a long generation, first and last eighth, and where free generation parts from the f16
    cache's.
    """
    return results.table(
        ["cache", "bits", "KLD mean", "first eighth", "last eighth", "same top token", "parts after"],
        [
            [
                r["key"]["cache"],
                f"{r['bits']:.2f}",
                f"{r['kld_mean']:.4f}",
                f"{r['kld_by_part'][0]:.4f}",
                f"{r['kld_by_part'][-1]:.4f}",
                f"{100 * r['same_top']:.1f} %",
                f"{r['parted_at']} tokens",
            ]
            for r in sorted(rows, key=lambda r: -r["bits"])
        ],
        markdown=True,
    )


def between(text: str, marker: str, table: str) -> str:
    """The text with `table` between <!-- marker --> and <!-- /marker -->; as it is when it has no such lines."""
    return re.sub(
        rf"(<!-- {marker} -->\n).*?(<!-- /{marker} -->)", lambda m: f"{m[1]}{table}\n{m[2]}", text, flags=re.DOTALL
    )


def fits_table() -> str:
    """Which context fits, as `ggml-kvq plan --markdown` prints it."""
    return fits.table(
        fits.KNOWN, [fits.memory_of(x) for x in fits.MEMORIES], [parse(c) for c in fits.CACHES], markdown=True
    )


def large_fits_table() -> str:
    """The same of larger models, on one or two cards, as `ggml-kvq plan --large --markdown` prints it."""
    memories = [fits.memory_of(x) for x in fits.MEMORIES_OF_LARGE]
    return fits.table(fits.LARGE, memories, [parse(c) for c in fits.CACHES], markdown=True)


def page(rows: list[results.Row], speed: list[results.Row], real: real_tables.Models) -> str:
    """docs/results.md."""
    first = next(r for r in rows if r["key"]["kind"] == "text")
    key = first["key"]
    refused = sorted({f"- {r['key']['cache']}: {r['refused']}" for r in rows if "refused" in r})
    tables = [
        "# Results",
        (
            "Written by scripts/update_results.py from results/*.jsonl; each row there names its commit, command and"
            " machine. How it is measured: [evaluation.md](evaluation.md)."
        ),
        *real_tables.page(real, retrieval_tables),
        "## A model made for this project, on a text",
        (
            f"{key['model']}, {first['n_tokens']} scored tokens of {key['text']}, window {key['n_ctx']}, batch"
            f" {key['n_ubatch']}. `bits` are true bits at this window, the method's f16 window of the newest 64 or 128"
            " tokens included; *long context* counts codes and their parameters alone, which is where long contexts go;"
            " predictors of `aqua-k` and `aqua-full`, and the 8-bit row that those keep per cell, are in the first"
            " column only ([aqua](methods/aqua.md) has their bits at 16k). `q4_0-sim` and `q8_0-sim` simulate what"
            " llama.cpp has not: its types with an exact window of 64 tokens and 4 exact first ones, rows rounded"
            " when they leave the window, queries and the own batch exact. [auto](methods/auto.md) was asked for so"
            " many bits at 131072 tokens."
        ),
        text_table(rows),
        "![KL divergence against true bits](img/frontier.png)",
    ]
    for heading, pattern, more_words in MORE_TEXTS:
        more = [row for path in sorted((ROOT / "results").glob(pattern)) for row in results.read(path) if "key" in row]
        if more:
            key = more[0]["key"]
            words = f"The same text, {key['chunks']} windows of {key['n_ctx']} tokens, batch {key['n_ubatch']}."
            tables += [f"### {heading}", words + more_words, text_table(more)]
    if any(r["key"]["kind"] == "retrieval" for r in rows):
        cuda = list(
            dict.fromkeys(
                r["key"]["cache"]
                for r in rows
                if r["key"]["kind"] == "retrieval" and any(d.startswith("CUDA") for d in r.get("devices", []))
            )
        )
        note = (
            f" Prompts of 2000 tokens and more with {' and '.join(cuda)} ran on an NVIDIA GPU, the others on a CPU."
            if cuda
            else ""
        )
        tables += [
            "## The same model: retrieval",
            "Right answers of all, greedy. A prompt of 4000 tokens takes upstream's CPU attention minutes with q2_0,"
            " hence its few samples." + note,
            *retrieval_tables(rows),
        ]
    long = [r for r in rows if r["key"]["kind"] == "drift" and "kld_mean" in r]
    if long:
        tables += [
            "## The same model: long generation",
            (
                f"{long[0]['key']['n_tokens']} tokens that the f16 cache wrote, decoded one by one; then the same seed,"
                " freely. Sampling is at temperature 0.8, where any rounding parts two texts: the methods here part"
                " inside their f16 window."
            ),
            drift_table(long),
        ]
    if speed:
        tables += [
            "## Speed on a CPU",
            "`ggml-kvq bench`, medians; ratios are to upstream's f16 cache in the same run.",
            bench.summary(speed, markdown=True),
            "![tokens/s against depth](img/speed.png)",
        ]
    tables += ["## Memory", "![cache size against context length](img/memory.png)"]
    if refused:
        tables += ["## Refused", "\n".join(refused)]
    return "\n\n".join(wrapped(part) for part in tables) + "\n"


def wrapped(part: str) -> str:
    """Prose in lines of at most 120 columns; tables, pictures and headings stay."""
    return "\n".join(
        line
        if line.startswith(("|", "!", "#"))
        else textwrap.fill(
            line,
            120,
            subsequent_indent="  " * line.startswith("- "),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in part.split("\n")
    )


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--check",
        action="store_true",
        help="change nothing; fail when README.md or a page of docs/ is stale",
    )
    p.add_argument(
        "-m", "--model", type=Path, default=ROOT / "models" / "kvq-demo-q8_0.gguf", help="model of the memory figure"
    )
    args = p.parse_args()
    rows = [
        row for path in sorted((ROOT / "results").glob("kvq-*.jsonl")) for row in results.read(path) if "key" in row
    ]
    speed = [row for path in sorted((ROOT / "results").glob("speed*.jsonl")) for row in results.read(path)]
    real = real_tables.read(ROOT / "results")
    files = {ROOT / "docs" / "results.md": page(rows, speed, real)}
    readme, fit_page, contexts = ROOT / "README.md", ROOT / "docs" / "fits.md", fits_table()
    old = readme.read_text(encoding="utf-8")
    if real_tables.complete(real):
        old = between(old, "real", real_tables.readme(real, width=1000))  # README.md does not wrap
        for other in (ROOT / "docs" / "comparison.md", ROOT / "docs" / "index.md"):
            files[other] = between(other.read_text(encoding="utf-8"), "real", real_tables.readme(real))
    files[readme] = between(old, "fits", contexts)
    text = between(fit_page.read_text(encoding="utf-8"), "fits", contexts)
    files[fit_page] = between(text, "large fits", large_fits_table())
    stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if args.check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale; run scripts/update_results.py", file=sys.stderr)
        return bool(stale)
    for path in stale:
        path.write_text(files[path], encoding="utf-8")
    image = ROOT / "docs" / "img"
    for name, model_rows in real.items():
        real_tables.draw(name, model_rows, image)
    drawn = [r for r in rows if r["key"]["kind"] != "text" or r["key"]["cache"] not in NOT_DRAWN]
    plotting.frontier(drawn, image / "frontier")
    if speed:
        plotting.speed(speed, image / "speed")
    plotting.memory(
        plotting.memory_rows(args.model, [parse(c) for c in MEMORY_CACHES], MEMORY_LENGTHS), image / "memory"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
