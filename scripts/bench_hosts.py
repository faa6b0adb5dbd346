#!/usr/bin/env python3
"""Milliseconds of a prompt and of a token in node-llama-cpp with its own binaries: plain and with our caches, in turns.

    scripts/bench_hosts.py -m MODEL [--method kivi --method auto] [--prompt-tokens 24,512] [-t 2] [--rounds 5]

node-llama-cpp comes from npm into the cache folder, as in tests/test_hosts.py. An idle machine is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from ggml_kvq import _paths

ROOT = Path(__file__).resolve().parents[1]
NPM = ("npm", "install", "--ignore-scripts", "--no-fund", "--no-audit", "--prefix", ".")


def node_folder(version: str) -> Path:
    sys.path.insert(0, str(ROOT / "scripts"))
    import fetch_llama_cpp

    folder = Path(fetch_llama_cpp.default_cache()) / "hosts" / f"node-llama-cpp-{version}"
    if not folder.is_dir():
        part = folder.with_suffix(".part")
        part.mkdir(parents=True, exist_ok=True)
        subprocess.run([*NPM, f"node-llama-cpp@{version}"], cwd=part, check=True)
        part.rename(folder)
    return folder


def once(folder: Path, args: argparse.Namespace, method: str, n_prompt: str) -> dict[str, float]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KVQ_", "LLAMA_ARG_"))}
    if method != "plain":
        name, _, opts = method.partition(":")
        env.update(GGML_BACKEND_PATH=str(_paths.backend()), KVQ_METHOD=name, KVQ_OPTS=opts)
    argv = ["node", ROOT / "scripts" / "bench_node.mjs", args.model.resolve(), n_prompt, args.threads, args.tokens]
    done = subprocess.run(
        [str(x) for x in argv], cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=1200
    )
    lines = [x for x in done.stdout.splitlines() if x.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{method}: node ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return dict(json.loads(lines[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--method", action="append", help="METHOD or METHOD:options; default: f16, kivi, auto")
    parser.add_argument("--prompt-tokens", default="24,512", help="lengths of prompts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="generated behind each (default: %(default)s)")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--version", default="3.21.1", help="of node-llama-cpp (default: %(default)s)")
    args = parser.parse_args()
    methods = ["plain", *(args.method or ["f16", "kivi", "auto"])]
    folder = node_folder(args.version)
    print(f"node-llama-cpp {args.version}, {args.model.name}, {args.threads} threads, medians of {args.rounds} rounds")
    print(f"{'prompt':>6}  {'cache':16} {'ms of the prompt':>17} {'ms a token':>11} {'x plain, token':>15}")
    for n_prompt in args.prompt_tokens.split(","):
        rows: dict[str, list[dict[str, float]]] = {m: [] for m in methods}
        for _ in range(args.rounds):
            for m in methods:
                rows[m].append(once(folder, args, m, n_prompt))
        plain = statistics.median(x["token"] for x in rows["plain"])
        for m in methods:
            prompt, token = (statistics.median(x[k] for x in rows[m]) for k in ("prompt", "token"))
            print(f"{n_prompt:>6}  {m:16} {prompt:17.1f} {token:11.2f} {plain / token:14.2f}x", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
