#!/usr/bin/env python3
"""The field's table: methods of papers as laboratory classes, beside the built-in ones, on one text.

    python scripts/lab_table.py measure -m MODEL.gguf -f TEXT.txt --fit FIT.txt [--chunks 1] [--only kivi,tcq]
    python scripts/lab_table.py measure -m MODEL.gguf --tasks multineedle,kv --samples 10 --fit FIT.txt
    python scripts/lab_table.py write [--check]

`measure` adds rows to results/lab.jsonl with ggml-kvq eval; rows that are there stay. `write` puts the tables into
docs/laboratory.md between their markers, and draws a frontier for each model and length.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from ggml_kvq import cli
from ggml_kvq.evaluate import results

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "lab.jsonl"
PAGE = ROOT / "docs" / "laboratory.md"
#: label, spec, where it is described; {fit}: the text that fit() learns from
FIELD = (
    ("q8_0", "upstream:q8_0", "llama.cpp"),
    ("q4_0", "upstream:q4_0", "llama.cpp"),
    ("kivi 2", "kivi:bits=2", "built in"),
    ("kivi 4", "kivi:bits=4", "built in"),
    ("higgs 2", "higgs:bits=2", "built in"),
    ("higgs 4", "higgs:bits=4", "built in"),
    ("zipcache", "zipcache", "built in"),
    ("auto 2.25", "auto:bits=2.25,at=131072", "built in"),
    ("auto 4.25", "auto:bits=4.25,at=131072", "built in"),
    ("auto 2.25 coordinates", "auto:bits=2.25,at=131072,coordinates=on", "built in"),
    ("xquant", "xquant", "built in"),
    ("lab-kivi 2", "lab:examples/lab/kivi.py", "arXiv 2402.02750"),
    ("lab-higgs 2", "lab:examples/lab/higgs.py", "arXiv 2411.17525"),
    ("lab-xquant", "lab:examples/lab/xquant.py:XQuant{fit}", "XQuant, 2025"),
    ("lab-aqua bias 2", "lab:examples/lab/aqua.py:Aqua{fit}", "arXiv 2501.19392"),
    ("turboquant 2", "lab:examples/lab/turboquant.py:TurboQuant,bits=2", "arXiv 2504.19874"),
    ("turboquant 3", "lab:examples/lab/turboquant.py:TurboQuant,bits=3", "arXiv 2504.19874"),
    ("turboquant 4", "lab:examples/lab/turboquant.py:TurboQuant,bits=4", "arXiv 2504.19874"),
    ("turboquant 3 with sign", "lab:examples/lab/turboquant.py:TurboQuant,bits=3,residual=true", "arXiv 2504.19874"),
    ("kvarn 2", "lab:examples/lab/kvarn.py:KVarN,bits=2", "arXiv 2606.03458"),
    ("kvarn 4/2", "lab:examples/lab/kvarn.py:KVarN,bits=4,v_bits=2", "arXiv 2606.03458"),
    ("kvquant 3", "lab:examples/lab/kvquant.py:KvQuant,bits=3{fit}", "arXiv 2401.18079"),
    ("kvquant 2", "lab:examples/lab/kvquant.py:KvQuant,bits=2{fit}", "arXiv 2401.18079"),
    ("pairs 4211", "lab:examples/lab/pairs.py:Pairs{fit}", "this project"),
    ("predictors 4211", "lab:examples/lab/predictors.py:Predictors{fit}", "this project, over arXiv 2501.19392"),
    ("streaming-llm", "lab:examples/lab/evict.py:StreamingLlm", "arXiv 2309.17453"),
    ("snapkv 50 %", "lab:examples/lab/evict.py:SnapKv,keep=0.5", "arXiv 2404.14469"),
    ("h2o 50 %", "lab:examples/lab/evict.py:H2o,keep=0.5", "arXiv 2306.14048"),
    ("tcq 2 64 states", "lab:examples/lab/tcq.py:Tcq,bits=2,memory=6", "Marcellin and Fischer, 1990"),
    ("tcq 3 64 states", "lab:examples/lab/tcq.py:Tcq,bits=3,memory=6", "Marcellin and Fischer, 1990"),
)  # fmt: skip


def label_of(name: str) -> str:
    """A label that a spec may have: no blanks."""
    return name.replace(" %", "").replace("/", "-").replace(" ", "-")


def measure(args: argparse.Namespace) -> int:
    """Rows of one model, in the order of FIELD."""
    fit = f",text={args.fit}" if args.fit else ""
    only = [x for x in args.only.split(",") if x]
    specs = [
        f"{label_of(name)}={spec.format(fit=fit)}"
        for name, spec, _ in FIELD
        if not only or any(label_of(name).startswith(x) for x in only)
    ]
    command = ["eval", "-m", args.model, "-ub", "128", "-o", str(RESULTS), "--quiet", "-t", str(args.threads)]
    if args.tasks:
        command += ["--tasks", args.tasks, "--lengths", str(args.ctx_size), "--samples", str(args.samples)]
        specs.insert(0, "f16")
    else:
        command += ["-f", args.file, "-c", str(args.ctx_size), "--chunks", str(args.chunks), "--no-swa-full"]
    return cli.main([*command, *(x for spec in specs for x in ("--cache", spec))])


def table(rows: list[results.Row]) -> str:
    """Rows of one model by falling bits of codes."""
    source = {label_of(name): where for name, _, where in FIELD}
    lines = []
    for row in sorted(rows, key=lambda r: -r.get("bits_no_window", 0)):
        label = row["key"]["cache"]
        name = label.removesuffix(" (simulated)")
        if "refused" in row:
            continue
        lines.append(
            [
                label,
                source.get(name, ""),
                f"{row['bits_no_window']:.2f}",
                f"{row['bits']:.2f}",
                f"{round(row['kld_mean'], 4) + 0.0:.4f}",
                f"{row['kld_p99']:.3f}",
                f"{100 * row['same_top']:.1f} %",
            ]
        )
    heads = ["cache", "described in", "bits of codes", "true bits", "KLD mean", "KLD 99 %", "same top token"]
    return results.table(heads, lines, markdown=True)


def retrieval(rows: list[results.Row]) -> str:
    """Tables of the retrieval rows, one a model and length: what was found, and how likely the answers were."""
    parts = []
    for model, n_tokens in sorted({(r["key"]["model"], r["key"]["n_tokens"]) for r in rows}):
        own = [r for r in rows if (r["key"]["model"], r["key"]["n_tokens"]) == (model, n_tokens)]
        tasks = sorted({r["key"]["task"] for r in own})
        caches: dict[str, dict[str, results.Row]] = {}
        for r in own:
            caches.setdefault(r["key"]["cache"], {})[r["key"]["task"]] = r
        lines = []
        for cache, of in caches.items():
            bits = next(iter(of.values()))["bits"]
            line = [cache, f"{bits:.2f}"]
            for row in (of.get(t) for t in tasks):
                line += [f"{row['right']} of {row['n']}", f"{row['answer_nll_mean']:.4f}"] if row else ["", ""]
            lines.append(line)
        heads = ["cache", "true bits", *(h for t in tasks for h in (t, "NLL"))]
        lines.sort(key=lambda line: -float(line[1]))
        parts.append(f"**{model}**, prompts of {n_tokens} tokens:\n\n{results.table(heads, lines, markdown=True)}")
    return "\n\n".join(parts)


def between(text: str, mark: str, inside: str) -> str:
    """text with what stands between <!-- mark --> and <!-- /mark --> replaced."""
    head, rest = text.split(f"<!-- {mark} -->")
    return f"{head}<!-- {mark} -->\n{inside}\n<!-- /{mark} -->{rest.split(f'<!-- /{mark} -->')[1]}"


def groups(rows: list[results.Row]) -> dict[str, list[results.Row]]:
    """Rows by model and tokens of a window, under the name of their picture."""
    out: dict[str, list[results.Row]] = {}
    for model, n_ctx in sorted({(r["key"]["model"], r["key"]["n_ctx"]) for r in rows}):
        name = f"laboratory-{model.removesuffix('.gguf')}-{n_ctx}"
        out[name] = [r for r in rows if (r["key"]["model"], r["key"]["n_ctx"]) == (model, n_ctx)]
    return out


def page(text: str, rows: list[results.Row]) -> str:
    """docs/laboratory.md with its tables and pictures."""
    parts = []
    for name, own in groups(rows).items():
        key = own[0]["key"]
        parts.append(
            f"**{key['model']}**, {key['n_ctx']} tokens a window, windows: {key['chunks'] or 'all'}, of"
            f" `{key['text']}`, batches of {key['n_ubatch']}:\n\n{table(own)}\n\n"
            f"![KL divergence against true bits](img/{name}.png)"
        )
    return between(text, "field", "\n\n".join(parts))


def write(args: argparse.Namespace) -> int:
    """0; 1 with --check when the page differs from the rows."""
    before = PAGE.read_text(encoding="utf-8")
    every = [r for r in results.read(RESULTS) if "key" in r]
    rows = [r for r in every if r["key"]["kind"] == "text"]
    found = [r for r in every if r["key"]["kind"] == "retrieval" and "refused" not in r]
    after = between(page(before, rows), "retrieval", retrieval(found))
    if args.check:
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    for name, own in groups(rows).items():
        with tempfile.TemporaryDirectory() as folder:
            of_one = Path(folder) / "rows.jsonl"
            of_one.write_text("".join(json.dumps(r) + "\n" for r in own), encoding="utf-8")
            status = cli.main(["plot", "frontier", str(of_one), "-o", str(ROOT / "docs" / "img" / name)])
        if status:
            return status
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    m = commands.add_parser("measure")
    m.add_argument("-m", "--model", required=True)
    what = m.add_mutually_exclusive_group(required=True)
    what.add_argument("-f", "--file")
    what.add_argument("--tasks", default="", help="retrieval instead of a text: tasks of ggml-kvq eval")
    m.add_argument("--samples", type=int, default=10, help="of a task")
    m.add_argument("--fit", default="", help="text that fit() learns from; not the one that is measured")
    m.add_argument("-c", "--ctx-size", type=int, default=2048)
    m.add_argument("--chunks", type=int, default=1)
    m.add_argument("-t", "--threads", type=int, default=2)
    m.add_argument("--only", default="", help="comma list of the first letters of labels")
    m.set_defaults(run=measure)
    w = commands.add_parser("write")
    w.add_argument("--check", action="store_true")
    w.set_defaults(run=write)
    args = parser.parse_args()
    code: int = args.run(args)
    return code


if __name__ == "__main__":
    sys.exit(main())
