#!/usr/bin/env python3
"""Two builds of the same programs in turns, as the wheel for every CPU and a build for this one: are they as fast?

    scripts/compare_builds.py A/ggml_kvq/lib B/ggml_kvq/lib -m MODEL.gguf [--minutes 15] [-t 2]

A folder holds llama-bench and libggml-kvq.so. Neighbouring turns make a pair, whose order changes each time; printed
are the medians of speed, and of the pairs' ratios with the interval that 95 % of resampled medians lie in. A machine
whose neighbours make turns of one program differ by 20 % needs some 40 pairs for 3 %.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

CACHES = [("upstream f16", ""), ("kivi", "bits=2"), ("higgs", "bits=2")]
TESTS = {"prompt of 512": ["-p", "512", "-n", "0"], "generation at 512": ["-p", "0", "-n", "64", "-d", "512"]}


def speed(lib: Path, model: Path, threads: int, method: str, opts: str, test: list[str]) -> float:
    """Tokens/s, the better of two. Raises SystemExit with what llama-bench said."""
    ours = not method.startswith("upstream")
    env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    if ours:
        env |= {"GGML_BACKEND_PATH": str(lib / "libggml-kvq.so"), "KVQ_METHOD": method, "KVQ_OPTS": opts}
        env |= {"KVQ_MODEL": str(model), "KVQ_CONFIG": "none"}
    device = "KVQ0" if ours else "none"
    command = [str(lib / "llama-bench"), "-m", str(model), "-t", str(threads), *test, "-fa", "1", "-dev", device]
    run = subprocess.run([*command, "-r", "2", "-o", "json"], env=env, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"compare_builds: {' '.join(command)}: {run.stderr.strip()[-300:]}")
    return float(max(json.loads(run.stdout)[0]["samples_ts"]))


def interval(ratios: list[float], rng: random.Random) -> tuple[float, float]:
    """What 95 % of the medians of resampled pairs lie in."""
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[-51]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("a", type=Path)
    p.add_argument("b", type=Path)
    p.add_argument("-m", "--model", type=Path, required=True)
    p.add_argument("-t", "--threads", type=int, default=os.cpu_count() or 1)
    p.add_argument("--minutes", type=float, default=15.0)
    args = p.parse_args()
    for lib in (args.a, args.b):
        if not (lib / "llama-bench").exists() or not (lib / "libggml-kvq.so").exists():
            p.error(f"{lib} holds no llama-bench and libggml-kvq.so: name the folder lib of an installed ggml_kvq")
    print(f"A {args.a}\nB {args.b}\n{' '.join(sys.argv)}", flush=True)
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    end = time.monotonic() + 60 * args.minutes
    turn = 0
    while not turn or time.monotonic() < end:
        for method, opts in CACHES:
            for name, test in TESTS.items():
                order = (args.a, args.b) if turn % 2 else (args.b, args.a)
                found = {lib: speed(lib, args.model, args.threads, method, opts, test) for lib in order}
                pairs.setdefault((method, name), []).append((found[args.a], found[args.b]))
        turn += 1
    rng = random.Random(1)
    print(f"{'cache':<14}{'test':<20}{'A t/s':>9}{'B t/s':>9}{'A/B':>8}   95 %           pairs")
    for (method, name), found_pairs in pairs.items():
        ratios = [a / b for a, b in found_pairs]
        low, high = interval(ratios, rng)
        a, b = (statistics.median(x) for x in zip(*found_pairs, strict=True))
        middle = f"{a:>9.1f}{b:>9.1f}{statistics.median(ratios):>8.3f}"
        print(f"{method:<14}{name:<20}{middle}   {low:.3f} to {high:.3f} {len(ratios):>5}")


if __name__ == "__main__":
    main()
