#!/usr/bin/env python3
"""Where a step on a GPU goes, from what scripts/trace_cuda.cpp wrote.

    scripts/trace_cuda.py TRACE.csv [--step prompt|token] [--layers 32] [--last 4] [--against OTHER.csv]

Steps are told apart by their attention kernels, one a layer: of the last steps, from one attention kernel to the one
that is so many layers later. Printed are us of a step: what a kernel adds to it, which is its end less the end of
whatever ended before, so that kernels that overlap count once; how often it runs; what the device waits, and between
which two.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from pathlib import Path

ATTENTION = {  # kernels, one of which runs in each layer
    "prompt": r"flash_attn_ext_f16|flash_attn_tile|rows_kernel<|tiles_kernel<",
    "token": r"flash_attn_ext_vec|short_kernel|mixed_kernel|bytes_kernel|decode_kernel<[^(]*,(false|true),[02]>",
}


def short(name: str) -> str:
    """A kernel's name with its template arguments, without types of arguments and namespaces."""
    name = re.sub(r"\(anonymous namespace\)::", "", name)
    name = re.sub(r"^void ", "", name)
    depth, end = 0, len(name)
    for i, c in enumerate(name):
        depth += {"<": 1, ">": -1}.get(c, 0)
        if c == "(" and depth == 0:
            end = i
            break
    return re.sub(r"\((?:int|bool|ggml_type)\)", "", name[:end]).replace(" ", "")[:76]


def records_of(path: Path) -> list[tuple[int, int, str]]:
    """Start, end and name, by start. Raises ValueError if the file is no trace."""
    records = []
    for line in path.read_text().splitlines():
        fields = line.split(",", 4)
        if len(fields) != 5 or not fields[0].isdigit():
            raise ValueError(f"{path}: no line of a trace: {line[:60]!r}; make it with scripts/trace_cuda.cpp")
        records.append((int(fields[0]), int(fields[1]), short(fields[4])))
    return sorted(records)


def account(path: Path, kind: str, layers: int, last: int) -> tuple[dict[str, float], dict[str, float]]:
    """us that each name adds to a step, and how often it runs. "(waits)": when nothing runs; "A -> B": between which
    two. Raises ValueError where there are too few steps.
    """
    records = records_of(path)
    at = [i for i, r in enumerate(records) if re.match(ATTENTION[kind], r[2])]
    if len(at) <= layers:
        raise ValueError(f"{path}: {len(at)} attention kernels of kind {kind}, and a step has {layers} (--layers)")
    n_steps = min(last, (len(at) - 1) // layers)
    us: dict[str, float] = defaultdict(float)
    runs: dict[str, float] = defaultdict(float)
    first = records[at[-1 - n_steps * layers]]
    until, before = first[1], first[2]
    for start, end, name in records[at[-1 - n_steps * layers] + 1 : at[-1] + 1]:
        for key, ns in (
            (name, end - max(start, until)),
            ("(waits)", start - until),
            (f"{before} -> {name}", start - until),
        ):
            us[key] += max(0, ns) / 1e3 / n_steps
            runs[key] += 1 / n_steps
        until = max(until, end)
        before = name
    us["(all)"] = (until - first[1]) / 1e3 / n_steps
    return us, runs


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("trace", type=Path)
    p.add_argument("--step", choices=ATTENTION, default="token")
    p.add_argument("--layers", type=int, default=32, help="attention layers of the model")
    p.add_argument("--last", type=int, default=4, help="steps that are looked at")
    p.add_argument("--against", type=Path, help="another trace, beside it")
    p.add_argument("--least", type=float, default=10.0, help="us of a step that are worth a line")
    args = p.parse_args()
    try:
        tables = [account(x, args.step, args.layers, args.last) for x in (args.trace, args.against) if x]
    except (OSError, ValueError) as e:
        print(f"trace_cuda: {e}", file=sys.stderr)
        return 1
    names = {name for us, _ in tables for name, x in us.items() if x >= args.least}
    for name in sorted(names, key=lambda x: (" -> " in x, -max(us.get(x, 0) for us, _ in tables))):
        print("".join(f"{us.get(name, 0):10.1f} us {runs.get(name, 0):6.1f} x" for us, runs in tables), name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
