#!/usr/bin/env python3
"""Milliseconds of a prompt and of a token in node-llama-cpp with its own binaries: plain and with our caches, in turns.

    scripts/bench_hosts.py -m MODEL [--method kivi --method auto] [--prompt-tokens 24,512] [-t 2] [--rounds 20]

node-llama-cpp comes from npm into the cache folder, as in tests/test_hosts.py. An idle machine is needed.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

from ggml_kvq import _paths

ROOT = Path(__file__).resolve().parents[1]
MOST_TURNS = 90  # of bench_node.mjs, with the one that touches memory
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


class Program:
    """node with one cache: it waits while the others have their turns."""

    def __init__(self, folder: Path, args: argparse.Namespace, method: str, n_prompt: str) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("KVQ_", "LLAMA_ARG_", "GGML_"))}
        if method != "plain":
            name, _, opts = method.partition(":")
            env.update(GGML_BACKEND_PATH=str(_paths.backend()), KVQ_METHOD=name, KVQ_OPTS=opts, KVQ_QUIET="1")
        argv = ["node", ROOT / "scripts" / "bench_node.mjs", args.model.resolve(), n_prompt, args.threads, args.tokens]
        self.method = method
        self.process = subprocess.Popen(
            [str(x) for x in argv], cwd=folder, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.prompt = self._read()

    def _read(self) -> float:
        assert self.process.stdout
        for line in self.process.stdout:
            if re.fullmatch(r"[\d.]+\n", line):
                return float(line)
        raise SystemExit(f"{self.method}: node ended with {self.process.wait()}")

    def turn(self) -> float:
        """Milliseconds of a token."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read()

    def end(self) -> None:
        self.process.communicate()


def measure(folder: Path, args: argparse.Namespace, methods: list[str], n_prompt: str) -> None:
    """Ratios within a round, because a machine's speed changes; a process keeps its own luck, so there are several."""
    prompts: dict[str, list[float]] = {m: [] for m in methods}
    tokens: dict[str, list[float]] = {m: [] for m in methods}
    ratios: dict[str, list[float]] = {m: [] for m in methods}
    for _ in range(args.processes):
        programs = [Program(folder, args, m, n_prompt) for m in methods]
        for i in range(args.rounds + 1):
            order = programs[i % len(programs) :] + programs[: i % len(programs)]  # no cache is always the first
            times = {p.method: p.turn() for p in order}
            for m, ms in times.items():
                if i:  # the first turn touches memory
                    tokens[m].append(ms)
                    ratios[m].append(times["plain"] / ms)
        for p in programs:
            prompts[p.method].append(p.prompt)
            p.end()
    for m in methods:
        prompt, token, ratio = (statistics.median(x[m]) for x in (prompts, tokens, ratios))
        print(f"{n_prompt:>6}  {m:16} {prompt:17.1f} {token:11.2f} {ratio:14.2f}x", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--method", action="append", help="METHOD or METHOD:options; default: f16, kivi, auto")
    parser.add_argument("--prompt-tokens", default="24,512", help="lengths of prompts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=8, help="of a turn (default: %(default)s)")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each process (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=3, help="of each cache (default: %(default)s)")
    parser.add_argument("--version", default="3.21.1", help="of node-llama-cpp (default: %(default)s)")
    args = parser.parse_args()
    if not 0 < args.rounds <= MOST_TURNS:
        parser.error(f"--rounds {args.rounds}: a context has room for {MOST_TURNS} turns")
    methods = ["plain", *(args.method or ["f16", "kivi", "auto"])]
    folder = node_folder(args.version)
    print(
        f"node-llama-cpp {args.version}, {args.model.name}, {args.threads} threads, medians of {args.processes}"
        f" processes with {args.rounds} turns of {args.tokens} tokens"
    )
    print(f"{'prompt':>6}  {'cache':16} {'ms cold prompt':>17} {'ms a token':>11} {'x plain, token':>15}")
    for n_prompt in args.prompt_tokens.split(","):
        measure(folder, args, methods, n_prompt)
    return 0


if __name__ == "__main__":
    sys.exit(main())
