"""Tables and figures of the pretrained models, for README.md and docs/: rows that scripts/real_models.py wrote."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import real_models
from ggml_kvq import named, plotting
from ggml_kvq.evaluate import results

Models = dict[str, list[results.Row]]  # by name of `ggml-kvq fetch`

#: rows of README.md's table; docs/results.md has all
README_CACHES = (
    "floor",
    "q8_0",
    "kivi-4",
    "q4_0",
    "q4_0-sim",
    "auto-4.25-coordinates",
    "auto-4.25",
    "kivi-2-g32",
    "auto-2.75-coordinates",
    "auto-2.75",
    "auto-2.4-predictors",
    "auto-2.25-coordinates",
    "auto-2.25",
    "specache-2",
)
SHORT = {
    "smollm2": "SmolLM2 135M",
    "gemma3": "Gemma 3 270M",
    "qwen2.5-coder": "Qwen2.5 Coder 0.5B",
    "qwen2.5-coder-1.5b": "Qwen2.5 Coder 1.5B",
}
WORDS = {
    "floor": "`f16` of this library",
    "q4_0-sim": "q4_0 with our f16 window, simulated",
    "kivi-4": "`kivi` bits=4",
    "kivi-2-g32": "`kivi` group=32",
    "kivi-2-g128": "`kivi` group=128",
    "higgs-4": "`higgs` bits=4",
    "higgs-2": "`higgs`",
    "zipcache-60": "`zipcache`",
    "minikv-50": "`minikv`",
    "xquant-1.38": "`xquant`",
    "aqua-bias": "`aqua` predictor=bias",
    "specache-2": "`specache`",
    "auto-2.25-alone": "`auto` 2.25, library alone",
    "auto-2.4-predictors": "`auto` 2.4, predictors=on",
    **{f"auto-{bits}": f"`auto` {bits}, coordinates=off" for bits in ("4.25", "3.5", "2.75", "2.25", "1.75")},
    **{f"auto-{bits}-coordinates": f"`auto` {bits}" for bits in ("4.25", "3.5", "2.75", "2.4", "2.25", "1.8", "1.75")},
}


def read(folder: Path) -> Models:
    """The rows of each model that has a file, in the order of real_models.TEXTS."""
    paths = {name: folder / f"real-{name}.jsonl" for name in real_models.TEXTS}
    return {name: [r for r in results.read(p) if "key" in r] for name, p in paths.items() if p.is_file()}


def on_text(name: str, rows: list[results.Row]) -> list[results.Row]:
    """Rows of the table's windows; the newest of a cache holds. Rows of more or fewer windows are left out."""
    text = real_models.TEXTS[name]
    wanted = (text.n_ctx, text.n_ubatch, text.chunks)
    found = {
        r["key"]["cache"]: r
        for r in rows
        if r["key"]["kind"] == "text" and tuple(r["key"][x] for x in ("n_ctx", "n_ubatch", "chunks")) == wanted
    }
    order = [real_models.label(c) for c in real_models.CACHES]
    return [found[cache] for cache in order if cache in found]


def complete(models: Models) -> bool:
    """Has every model every row of README.md's table, measured or refused?"""
    return all(
        set(README_CACHES) <= {r["key"]["cache"] for r in on_text(name, models.get(name, []))}
        for name in real_models.TEXTS
    )


def words(cache: str) -> str:
    """A cache in words of its switches."""
    return WORDS.get(cache) or (f"`auto` {cache.removeprefix('auto-')}" if cache.startswith("auto-") else cache)


def bits_of(rows: list[results.Row]) -> str:
    """Bits at 131072 tokens, of one model or from the least to the most; a second tier behind a plus."""
    near = sorted(r["bits_long"] for r in rows)
    far = [r["bits_far_long"] for r in rows if "bits_far_long" in r]
    low, high = f"{near[0]:.2f}", f"{near[-1]:.2f}"
    return (low if low == high else f"{low} - {high}") + (f" + {max(far):.0f} far" if far else "")


def nats(row: results.Row | None) -> str:
    """A mean divergence; empty where nothing was measured."""
    return "" if row is None else "refused" if "kld_mean" not in row else f"{max(row['kld_mean'], 0):.4f}"


def together(models: Models, caches: list[str]) -> str:
    """One row a cache, most bits first: bits, divergence on each model."""
    by = {name: {r["key"]["cache"]: r for r in on_text(name, rows)} for name, rows in models.items()}
    lines: list[tuple[float, list[str]]] = []
    for cache in caches:
        rows = [by[name][cache] for name in models if "bits_long" in by[name].get(cache, {})]
        if rows:
            cells = [words(cache), bits_of(rows), *[nats(by[name].get(cache)) for name in models]]
            lines.append((-max(r["bits_long"] for r in rows), cells))
    heads = ["cache", "bits", *[SHORT[name] for name in models]]
    return results.table(heads, [cells for _, cells in sorted(lines, key=lambda x: x[0])], markdown=True)


def beside_q4_0(models: Models, cache: str) -> str:
    """On which models this cache loses less than q4_0."""
    by = {name: {r["key"]["cache"]: r for r in on_text(name, rows)} for name, rows in models.items()}
    less = [SHORT[n] for n in models if by[n][cache]["kld_mean"] < by[n]["q4_0"]["kld_mean"]]
    more = [SHORT[n] for n in models if SHORT[n] not in less]
    where = [f"{word} on {' and '.join(names)}" for word, names in (("less", less), ("more", more)) if names]
    return " and ".join(where) if more else "less on every model"


def broken(models: Models) -> str:
    """Models whose perplexity q4_0 more than doubles, and what `auto` 2.25 makes of it; "" where there is none."""
    names: list[str] = []
    ppl: dict[str, list[str]] = {}
    for name, rows in models.items():
        of = {r["key"]["cache"]: r["ppl"] for r in on_text(name, rows) if "ppl" in r}
        if of["q4_0"] > 2 * of["f16"]:
            names.append(SHORT[name])
            for cache in ("q4_0", "f16", "auto-2.25"):
                ppl.setdefault(cache, []).append(f"{of[cache]:.0f}" if of[cache] > 100 else f"{of[cache]:.2f}")
    if not names:
        return ""
    q4, f16, auto = (" and ".join(ppl[cache]) for cache in ("q4_0", "f16", "auto-2.25"))
    return f" q4_0 breaks {' and '.join(names)}: perplexity {q4}, with f16 {f16}, with `auto` 2.25 {auto}."


def readme(models: Models, width: int = 120) -> str:
    """The table of README.md, and what it says of few bits, in lines of `width` columns."""
    said: dict[str, list[str]] = {}
    for cache in ("auto-2.75", "auto-2.25"):  # without coordinates, which loses more
        said.setdefault(beside_q4_0(models, cache), []).append(f"`auto` {cache.removeprefix('auto-')}")
    few = "; ".join(f"{' and '.join(of)} lose{'s' * (len(of) == 1)} {what}" for what, of in said.items())
    beside = f"Beside llama.cpp's q4_0 of 4.5 bits: {few}.{broken(models)}"
    return f"{together(models, list(README_CACHES))}\n\n{textwrap.fill(beside, width)}"


def table(rows: list[results.Row]) -> str:
    """All figures of one model, most bits at 131072 tokens first."""
    return results.table(
        ["cache", "bits", "at this window", "PPL", "KLD mean", "KLD 99 %", "same top token"],
        [
            [
                r["key"]["cache"],
                bits_of([r]),
                f"{r['bits']:.2f}",
                f"{r['ppl']:.3f}",
                nats(r),
                f"{r['kld_p99']:.3f}",
                f"{100 * r['same_top']:.1f} %",
            ]
            for r in sorted((r for r in rows if "kld_mean" in r), key=lambda r: -r["bits_long"])
        ],
        markdown=True,
    )


def long_table(rows: list[results.Row]) -> str:
    """Divergence by length of context, one window each; "" where none was measured."""
    cells = [r for r in rows if r["key"]["kind"] == "text" and r["key"]["chunks"] == 1 and r["key"]["n_ubatch"] == 512]
    lengths = sorted({r["key"]["n_ctx"] for r in cells})
    by = {(r["key"]["cache"], r["key"]["n_ctx"]): r for r in cells}
    caches = [real_models.label(c) for c in real_models.CACHES]
    shown = [c for c in caches if any((c, n) in by for n in lengths)]
    body = [[c, *[nats(by.get((c, n))) for n in lengths]] for c in shown]
    return results.table(["KLD mean", *[f"{n} tokens" for n in lengths]], body, markdown=True) if lengths else ""


def page(models: Models, retrieval: Callable[[list[results.Row]], list[str]]) -> list[str]:
    """Parts of docs/results.md; none where there are no rows."""
    if not models:
        return []
    names = list(models)
    texts = {name: on_text(name, rows) for name, rows in models.items()}
    machines = sorted(
        {r["devices"][0].split(":")[-1].strip() for rows in texts.values() for r in rows if "devices" in r}
    )
    out = [
        "## Pretrained models",
        (
            "Mean KL divergence (nats a token) from llama.cpp's f16 cache on a text that no calibration has seen."
            f" Windows of {', '.join(f'{real_models.TEXTS[n].n_ctx} ({SHORT[n]})' for n in names)} tokens, three each,"
            " batches of 128. *bits* are true bits in a context of 131072 tokens, everything included; of `specache`"
            " the near copy, and behind the plus what lies in host memory. `floor` is this library's f16. `q4_0-sim` is"
            " what llama.cpp has not: q4_0 with an exact window of 64 tokens and 4 exact first ones. Nothing was"
            f" calibrated by a user. Measured on: {', '.join(machines)}."
        ),
        together(models, [real_models.label(c) for c in real_models.CACHES]),
    ]
    for name, rows in models.items():
        out += [f"### {named.find(name).about.split(',')[0]}"]
        if texts[name]:
            out += [table(texts[name]), f"![KL divergence against true bits](img/frontier-{name}.png)"]
        if long := long_table(rows):
            out += ["One window of a longer context, batches of 512:", long]
        cells = [r for r in rows if r["key"]["kind"] == "retrieval"]
        if cells:
            out += ["Right answers of all, greedy, in the model's chat template, batches of 512.", *retrieval(cells)]
        refused = sorted({f"- {r['key']['cache']}: {r['refused']}" for r in rows if "refused" in r})
        out += ["Refused:", "\n".join(refused)] if refused else []
    return out


def draw(name: str, rows: list[results.Row], folder: Path) -> None:
    """The frontier of one model, at the bits of 131072 tokens."""
    shown = [
        {**r, "bits": r["bits_long"], "bits_no_window": r["bits_long"]} for r in on_text(name, rows) if "bits_long" in r
    ]
    if shown and not plotting.is_base(shown):
        plotting.frontier(shown, folder / f"frontier-{name}", title="bits of a context of 131072 tokens")
