"""Figures from result files: frontier (damage against true bits), memory against context, speed against depth.

Every figure is written twice, NAME.png (README) and NAME.svg, and shows only rows given to it: nothing is typed in by
hand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import files
from .errors import KvqError, MethodError

Row = dict[str, Any]

# Okabe-Ito, safe for colour-blind readers; upstream's own caches are grey.
COLORS = {
    "kivi": "#0072B2",
    "xquant": "#D55E00",
    "higgs": "#009E73",
    "aqua": "#CC79A7",
    "zipcache": "#E69F00",
    "minikv": "#56B4E9",
    "specache": "#000000",
    "auto": "#882255",
    "lab": "#999933",
    "f16": "#777777",
}
UPSTREAM_COLOR = "#777777"
_FLOOR = 1e-4  # KLD shown at least; below lies f16 rounding
_FEWEST = 0.5  # the axis of bits is logarithmic; who lets cells go has none in a long context
_SIMULATED = " (simulated)"


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as e:
        raise KvqError("plots need matplotlib; pip install matplotlib") from e
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 11,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.25,
            "legend.frameon": False,
            "svg.hashsalt": "ggml-kvq",
            "svg.fonttype": "none",
        }
    )
    return plt


def _save(figure: Any, out: str | Path) -> list[Path]:
    base = Path(out)
    base = base.with_suffix("") if base.suffix in (".png", ".svg") else base
    paths = [base.with_name(base.name + ending) for ending in (".png", ".svg")]  # a name may hold a dot
    with files.whole(paths[0]) as partial:
        figure.savefig(partial, dpi=160, metadata={"Software": None})
    with files.whole(paths[1]) as partial:
        figure.savefig(partial, metadata={"Date": None})
    return paths


def _color(row: Row) -> str:
    method = row.get("method", "upstream")
    return COLORS.get(method, "#444444") if method != "upstream" else UPSTREAM_COLOR


def _is_reference(row: Row) -> bool:
    return bool(row.get("method") == "upstream" and row["bits"] == 16)


def is_base(rows: Sequence[Row]) -> bool:
    """Are these rows of the f16 reference and nothing else?"""
    return all(_is_reference(r) for r in rows)


def _marker(row: Row) -> str:
    return "s" if row.get("method") == "upstream" else ("D" if "null" in row["key"]["cache"] else "o")


def _bits_axis(axis: Any, bits: Sequence[float]) -> None:
    low, high = max(min(bits), _FEWEST), max(bits)
    ticks = [t for t in (1, 1.5, 2, 3, 4, 5, 6, 8, 12, 16) if low * 0.8 <= t <= high * 1.25]
    axis.set_xscale("log")
    axis.set_xlim(low * 0.85, high * 1.25)
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axis.minorticks_off()
    axis.set_xlabel("true bits per K or V value")


def _annotate(axis: Any, points: list[tuple[float, float, str, str]]) -> None:
    """Labels beside their points: of the free places around a point the nearest, with a hairline to it when that is
    not next to it.
    """
    from matplotlib.text import Text

    figure = axis.figure
    figure.canvas.draw()
    taken: list[Any] = []
    marks = [axis.transData.transform((x, y)) for x, y, _, _ in points]
    near = [(7, 3), (7, -11), (-7, 5), (-7, -12)]
    far = [
        (side * dx, dy)
        for dx in (8, 24, 40, 60)
        for dy in (14, -22, 25, -33, 36, -44, 47, -55, 3, -8)
        for side in (1, -1)
    ]
    places = near + sorted(far, key=lambda p: math.hypot(*p))
    for x, y, text, color in sorted(points, key=lambda p: (-p[1], p[0])):
        for place in places:
            line = (
                None
                if place in near
                else {"arrowstyle": "-", "color": color, "lw": 0.6, "alpha": 0.7, "shrinkA": 0, "shrinkB": 3}
            )
            side = "left" if place[0] > 0 else "right"
            note = axis.annotate(
                text, (x, y), place, textcoords="offset points", fontsize=8.5, color=color, ha=side, arrowprops=line
            )
            note.update_positions(figure.canvas.get_renderer())
            box = Text.get_window_extent(note).padded(0.5)  # of the text alone, without its line
            free = not any(box.overlaps(t) for t in taken) and not any(box.padded(3).contains(*m) for m in marks)
            inside = (
                axis.bbox.x0 < box.x0
                and box.x1 < figure.bbox.width
                and axis.bbox.y0 < box.y0
                and box.y1 < figure.bbox.height
            )
            if free and inside:
                break
            note.remove()
        else:
            note = axis.annotate(text, (x, y), near[0], textcoords="offset points", fontsize=8.5, color=color)
            box = note.get_window_extent()
        taken.append(box)


def frontier(rows: Sequence[Row], out: str | Path, *, title: str = "") -> list[Path]:
    """KL divergence (log) and retrieval accuracy against true bits (log), one point a cache.

    rows: of `ggml-kvq eval`, kinds "text" and "retrieval" (accuracy is averaged over tasks, at the length that most
    caches have). The whisker to the left of a point ends at the bits of a very long context, where the f16 window no
    longer counts. KvqError when no row fits.
    """
    text = [r for r in rows if r["key"]["kind"] == "text" and "kld_mean" in r and r["bits"] > 0]
    cells = [r for r in rows if r["key"]["kind"] == "retrieval" and "accuracy" in r]
    if not text and not cells:
        raise KvqError("no row of kind text or retrieval in these files; run ggml-kvq eval with -f or --tasks first")
    if text and is_base(text):
        raise KvqError("these files hold the f16 base alone, and no cache to draw; run ggml-kvq eval with --cache SPEC")
    plt = _pyplot()
    n = bool(text) + bool(cells)
    ratios = [1.7, 1.0] if n == 2 else [1.0]
    figure, axes = plt.subplots(
        1, n, figsize=(5.2 * sum(ratios), 5.4), layout="constrained", squeeze=False, width_ratios=ratios
    )
    panels = list(axes[0])
    if text:
        axis = panels.pop(0)
        shown = [r for r in text if not _is_reference(r)]
        _bits_axis(axis, [b for r in shown for b in (r["bits"], r["bits_no_window"])])
        axis.set_yscale("log")
        axis.set_ylabel("mean KL divergence to the f16 cache (nats)")
        points = []
        for r in shown:
            x, y = r["bits"], max(r["kld_mean"], _FLOOR)
            axis.plot([max(r["bits_no_window"], _FEWEST), x], [y, y], "-", color=_color(r), alpha=0.45, lw=1.2)
            axis.plot(
                x, y, _marker(r), color=_color(r), ms=7, mfc="white" if "null" in r["key"]["cache"] else _color(r)
            )
            points.append((x, y, r["key"]["cache"].removesuffix(_SIMULATED), _color(r)))
        notes = []
        if any(r["key"]["cache"].endswith(_SIMULATED) for r in shown):
            notes.append(("this colour: simulated, rows of f16 hold what the class gave back", COLORS["lab"]))
        if any(r["bits_no_window"] < r["bits"] for r in shown):
            notes.append(("thin line: down to the bits of a long context (f16 window left out)", "#555555"))
        for i, (words, color) in enumerate(notes):
            axis.text(0.02, 0.02 + 0.035 * i, words, transform=axis.transAxes, fontsize=8, color=color)
        top = max(p[1] for p in points)
        axis.set_ylim(_FLOOR / 1.5, top * 2.5)
        _annotate(axis, points)
        key = text[0]["key"]
        model = key["model"].removesuffix(".gguf")
        how = f"{key['text']}, window {key['n_ctx']}, ubatch {key['n_ubatch']}"
        axis.set_title(f"{model},{' ' if len(model + how) < 70 else chr(10)}{how}", fontsize=10)
    if cells:
        axis = panels.pop(0)
        lengths = sorted({r["key"]["n_tokens"] for r in cells})
        caches = list(dict.fromkeys(r["key"]["cache"] for r in cells))
        length = max(lengths, key=lambda n: (len({r["key"]["cache"] for r in cells if r["key"]["n_tokens"] == n}), n))
        points = []
        for cache in caches:
            group = [r for r in cells if r["key"]["cache"] == cache and r["key"]["n_tokens"] == length]
            if not group:
                continue
            y = sum(r["right"] for r in group) / sum(r["n"] for r in group)
            err = math.sqrt(y * (1 - y) / sum(r["n"] for r in group))
            x = group[0]["bits"]
            axis.errorbar(x, y, err, fmt=_marker(group[0]), color=_color(group[0]), ms=7, capsize=2, lw=1)
            points.append((x, y, cache, _color(group[0])))
        _bits_axis(axis, [p[0] for p in points])
        axis.set_ylim(-0.03, 1.06)
        axis.set_ylabel("share of exact answers")
        _annotate(axis, points)
        names = ", ".join(dict.fromkeys(r["key"]["task"] for r in cells))
        axis.set_title(f"{names} at {length} tokens", fontsize=10)
    if title:
        figure.suptitle(title)
    paths = _save(figure, out)
    plt.close(figure)
    return paths


def memory_rows(model: str | Path, caches: Sequence[Any], lengths: Sequence[int]) -> list[Row]:
    """Planned size of each cache at each context length: rows of kind "memory" with bytes_total (bytes) and bits.

    caches: CacheSpec; upstream's sizes follow from ggml's type table, ours from kvq_plan with the model's layer shapes.
    """
    from . import gguf_header, info

    header = gguf_header.read(model, tensors=True)
    rows = []
    for n in lengths:
        for plan, cache in zip(info.plans(header, n, caches), caches, strict=True):
            if plan.refused:
                raise MethodError(plan.refused)
            key = {"kind": "memory", "cache": cache.label, "model": Path(model).name, "n_ctx": n}
            method = cache.method or "upstream"
            rows.append({"key": key, "method": method, "bytes_total": plan.bytes_total, "bits": plan.bits})
    return rows


def memory(rows: Sequence[Row], out: str | Path, *, title: str = "") -> list[Path]:
    """Cache size (log) against context length (log), one line a cache; rows of memory_rows()."""
    chosen = [r for r in rows if r["key"]["kind"] == "memory"]
    if not chosen:
        raise KvqError("no row of kind memory; give -m MODEL and --cache")
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(7.2, 4.6), layout="constrained")
    ends = []
    for cache in dict.fromkeys(r["key"]["cache"] for r in chosen):
        group = sorted((r for r in chosen if r["key"]["cache"] == cache), key=lambda r: r["key"]["n_ctx"])
        xs, ys = [r["key"]["n_ctx"] for r in group], [r["bytes_total"] / 2**20 for r in group]
        style = "--" if group[0]["method"] == "upstream" else "-"
        axis.plot(xs, ys, style, color=_color(group[0]), lw=2)
        ends.append((ys[-1], f"{cache}  ({group[-1]['bits']:.2f} bits)", _color(group[0])))
    xs = sorted({r["key"]["n_ctx"] for r in chosen})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(xs, [_count(x) for x in xs])
    axis.set_xlim(xs[0], xs[-1])
    axis.yaxis.set_major_formatter(lambda v, _: f"{v / 1024:g} GiB" if v >= 1024 else f"{v:g} MiB")
    axis.minorticks_off()
    axis.set_xlabel("context length (tokens)")
    axis.set_ylabel("KV cache")
    _end_labels(axis, xs[-1], ends)
    axis.set_title(title or f"KV cache of {chosen[0]['key']['model'].removesuffix('.gguf')}", fontsize=11)
    paths = _save(figure, out)
    plt.close(figure)
    return paths


def _end_labels(axis: Any, x: float, ends: list[tuple[float, str, str]]) -> None:
    """Names at the right end of lines, pushed apart where lines end close together."""
    axis.figure.canvas.draw()
    step, last = 12 * axis.figure.dpi / 72, math.inf
    for y, text, color in sorted(ends, reverse=True):
        at = axis.transData.transform((x, y))[1]
        place = min(at, last - step)
        last = place
        axis.annotate(
            text,
            (x, y),
            (6, (place - at) * 72 / axis.figure.dpi - 3),
            textcoords="offset points",
            fontsize=8.5,
            color=color,
            annotation_clip=False,
        )


def _count(n: float) -> str:
    return f"{n / 1024:g}k" if n >= 1024 else f"{n:g}"


def speed(rows: Sequence[Row], out: str | Path, *, title: str = "") -> list[Path]:
    """Generation speed against depth, one line a cache.

    rows: of `ggml-kvq bench` or llama-bench -o jsonl: n_gen > 0, n_depth (tokens), avg_ts and stddev_ts (tokens/s),
    and the cache's name in cache, kv_method (+ kv_opts), or type_k/type_v.
    """
    chosen = [r for r in rows if r.get("n_gen", 0) > 0 and "avg_ts" in r]
    if not chosen:
        raise KvqError(
            "no generation row (n_gen > 0, avg_ts) in these files; run ggml-kvq bench or llama-bench -n 32 -d ... -o"
            " jsonl"
        )

    def name(r: Row) -> str:
        if r.get("cache"):
            return str(r["cache"])
        if r.get("kv_method"):
            return f"{r['kv_method']} {r.get('kv_opts') or ''}".strip()
        return str(r.get("type_k")) if r.get("type_k") == r.get("type_v") else f"{r.get('type_k')}/{r.get('type_v')}"

    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(7.2, 4.6), layout="constrained")
    ends = []
    for cache in dict.fromkeys(map(name, chosen)):
        group = sorted((r for r in chosen if name(r) == cache), key=lambda r: r.get("n_depth", 0))
        xs, ys = [r.get("n_depth", 0) for r in group], [r["avg_ts"] for r in group]
        method = next((m for m in COLORS if cache.startswith(m) and (m != "f16" or group[0].get("kv_method"))), "")
        color = COLORS.get(method, UPSTREAM_COLOR)
        axis.errorbar(
            xs,
            ys,
            [r.get("stddev_ts", 0) for r in group],
            fmt="o-" if method else "s--",
            color=color,
            lw=2,
            ms=5,
            capsize=2,
        )
        ends.append((ys[-1], cache, color))
    depths = sorted({r.get("n_depth", 0) for r in chosen})
    axis.set_xticks(depths, [_count(d) for d in depths])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("depth (tokens already in the cache)")
    axis.set_ylabel("generation, tokens/s")
    _end_labels(axis, depths[-1], ends)
    axis.set_title(title or str(chosen[0].get("model_type", "")), fontsize=11)
    paths = _save(figure, out)
    plt.close(figure)
    return paths
