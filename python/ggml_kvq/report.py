"""One HTML page of evaluation rows: what to choose in plain words, the frontier, the tables. It needs no network and no
other file.
"""

from __future__ import annotations

import html
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__, files, plotting
from .errors import KvqError

Row = dict[str, Any]

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
tr.edge td { background: #eef7ee; } .note { color: #555; font-size: .9rem; } svg { max-width: 100%; height: auto; }
code { background: #f3f3f3; padding: .1rem .3rem; overflow-wrap: anywhere; }
"""


def edge(rows: Sequence[Row]) -> list[Row]:
    """The frontier: text rows that no other row beats in both long-context bits and divergence, by bits."""
    out: list[Row] = []
    for row in sorted(rows, key=lambda r: (r["bits_no_window"], r["kld_mean"])):
        if not out or row["kld_mean"] < out[-1]["kld_mean"]:
            out.append(row)
    return out


def judge(kld: float) -> str:
    """A divergence in words. The steps are those of llama.cpp's own types on the small evaluation model: q8_0 has
    0.0006, q5_0 0.004, q4_0 0.014 nats a token.
    """
    for most, words in (
        (0.002, "as f16, but for rounding"),
        (0.006, "between q8_0 and q5_0"),
        (0.02, "about q4_0"),
        (0.1, "answers change at times"),
        (1.0, "answers change often"),
    ):
        if kld <= most:
            return words
    return "broken"


def groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Text rows that may be compared: of one model, text, window and ubatch."""
    out: dict[tuple[Any, ...], list[Row]] = {}
    for r in rows:
        names = ("model", "model_hash", "text", "text_hash", "n_ctx", "n_ubatch", "stride", "chunks")
        out.setdefault(tuple(r["key"].get(name) for name in names), []).append(r)
    return list(out.values())


def page(rows: Sequence[Row], title: str = "") -> str:
    """HTML of rows of `ggml-kvq eval`. KvqError when none of them holds a divergence."""
    measured = [r for r in rows if "key" in r and "refused" not in r]
    text = [r for r in measured if r["key"]["kind"] == "text" and "kld_mean" in r]
    if not text:
        raise KvqError("the result files hold no row with a divergence; run ggml-kvq eval -f TEXT first")
    models = sorted({r["key"]["model"] for r in text})
    parts = [f"<h1>{_text(title or 'KV caches of ' + ', '.join(models))}</h1>"]
    held = groups(text)  # one of the f16 base alone has nothing to choose from; where all are, plotting says so
    parts += [_section(group) for group in [g for g in held if not plotting.is_base(g)] or held]
    retrieval = [r for r in measured if r["key"]["kind"] == "retrieval"]
    if retrieval:
        parts += ["<h2>Retrieval</h2>", _retrieval_table(retrieval)]
    parts += ["<h2>How to repeat it</h2>", _commands(measured)]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>ggml-kvq report</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _section(text: Sequence[Row]) -> str:
    """One group of comparable rows."""
    key = text[0]["key"]
    kept = edge([r for r in text if r["bits"] < 15.9])
    return "\n".join(
        [
            f"<h2>{_text(key['model'])}: what to choose</h2>",
            f"<p class=note>{_text(key['text'])}, windows of {key['n_ctx']} tokens, ubatch {key['n_ubatch']};"
            f" {text[0].get('n_tokens', '?')} tokens scored. ggml-kvq {__version__}.</p>",
            _choices(kept),
            "<h2>Divergence against bits</h2>",
            _figure(text),
            "<h2>Text</h2>",
            _text_table(text, kept),
        ]
    )


def write(rows: Sequence[Row], out: str | Path, title: str = "") -> None:
    """page() as a file, whole or not at all."""
    text = page(rows, title)
    with files.whole(out, need=len(text)) as partial:
        partial.write_text(text, encoding="utf-8")


def _text(x: object) -> str:
    return html.escape(str(x))


def _choices(kept: Sequence[Row]) -> str:
    if not kept:
        return "<p>Only caches of 16 bits were measured.</p>"
    items = "".join(
        f"<li><b>{r['bits_no_window']:.2f} bits</b>, {16 / r['bits_no_window']:.1f} times less than f16:"
        f" <code>{_text(r['key']['spec'])}</code>, {judge(r['kld_mean'])} (divergence {r['kld_mean']:.4f},"
        f" the same next token {100 * r['same_top']:.1f} % of the time).</li>"
        for r in kept
    )
    return (
        f"<p>No other cache here loses less with as few bits (long contexts: codes and scales, the f16 window not"
        f" counted):</p><ul>{items}</ul>"
    )


def _figure(rows: Sequence[Row]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        paths = plotting.frontier(rows, Path(folder) / "frontier")
        svg = next(p for p in paths if p.suffix == ".svg").read_text(encoding="utf-8")
    return svg[svg.index("<svg") :]


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], marked: Sequence[bool]) -> str:
    head = "".join(f"<th>{_text(h)}</th>" for h in headers)
    body = "".join(
        f"<tr{' class=edge' if mark else ''}>" + "".join(f"<td>{_text(c)}</td>" for c in row) + "</tr>\n"
        for row, mark in zip(rows, marked)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"


def _text_table(rows: Sequence[Row], kept: Sequence[Row]) -> str:
    by_loss = sorted(rows, key=lambda r: r["kld_mean"])
    cells = [
        [
            r["key"]["cache"],
            f"{r['bits']:.2f}",
            f"{r['bits_no_window']:.2f}",
            f"{r['ppl']:.3f}",
            f"{r['kld_mean']:.4f}",
            f"{100 * r['same_top']:.1f} %",
            f"{r['bytes_total'] / (1 << 20):.1f}",
        ]
        for r in by_loss
    ]
    note = "<p class=note>Green: on the frontier. True bits are all bytes allocated at this context length.</p>"
    headers = ["cache", "true bits", "long context", "perplexity", "divergence", "same token", "MiB"]
    return _table(headers, cells, [any(r is k for k in kept) for r in by_loss]) + note


def _retrieval_table(rows: Sequence[Row]) -> str:
    columns = sorted({(r["key"]["task"], r["key"]["n_tokens"]) for r in rows})
    caches = list(dict.fromkeys(r["key"]["cache"] for r in rows))
    found = {(r["key"]["cache"], r["key"]["task"], r["key"]["n_tokens"]): r for r in rows}
    cells = [
        [c, *(f"{found[(c, *at)]['accuracy']:.3f}" if (c, *at) in found else "" for at in columns)] for c in caches
    ]
    return _table(["cache", *(f"{task} {n}" for task, n in columns)], cells, [False] * len(cells))


def _commands(rows: Sequence[Row]) -> str:
    seen = dict.fromkeys((r.get("command", ""), r.get("commit", ""), r.get("machine", "")) for r in rows)
    return "".join(
        f"<p><code>{_text(command)}</code><br><span class=note>{_text(commit)}, {_text(machine)}</span></p>"
        for command, commit, machine in seen
        if command
    )
