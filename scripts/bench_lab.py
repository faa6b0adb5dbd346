#!/usr/bin/env python3
"""What the laboratory's calls cost: a prompt with a built-in method and with the same method as a class, in turns.

python scripts/bench_lab.py -m MODEL.gguf -f TEXT.txt [-n 2048] [--turns 3] [--pair kivi:bits=2 examples/lab/kivi.py]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from ggml_kvq import Model


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-m", "--model", required=True)
    p.add_argument("-f", "--file", required=True)
    p.add_argument("-n", type=int, default=2048, help="tokens of the prompt")
    p.add_argument("-ub", "--ubatch", type=int, default=128)
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("--turns", type=int, default=3)
    p.add_argument("--pair", nargs=2, default=("kivi:bits=2", "examples/lab/kivi.py"), metavar=("METHOD:OPTS", "CLASS"))
    a = p.parse_args()
    method, _, opts = a.pair[0].partition(":")
    arms: dict[str, dict[str, Any]] = {
        "upstream": {"kv_method": "upstream"},
        a.pair[0]: {"kv_method": method, "kv_opts": opts},
        f"lab:{a.pair[1]}": {"kv_method": "lab", "lab": a.pair[1]},
    }
    took: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(a.turns):
        for name, kwargs in arms.items():
            with Model(a.model, n_ctx=a.n, n_ubatch=a.ubatch, n_batch=a.ubatch, n_threads=a.threads, **kwargs) as m:
                ids = np.asarray(m.tokenize(Path(a.file).read_text()[: 8 * a.n])[: a.n], np.int32)
                begin = time.perf_counter()
                for _ in m.feed(ids):
                    pass
                took[name].append(time.perf_counter() - begin)
    median = {name: statistics.median(times) for name, times in took.items()}
    for name, seconds in median.items():
        print(f"{name:40s} {seconds:7.2f} s  {seconds / median['upstream']:.2f} of upstream's")
    _, built_in, lab = median.values()
    print(f"a class takes {lab / built_in:.2f} times the built-in's time")


if __name__ == "__main__":
    main()
