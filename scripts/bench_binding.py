#!/usr/bin/env python3
"""Milliseconds a token of Model.generate beside llama-completion's, in the same setting and in turns.

    scripts/bench_binding.py -m MODEL [--method upstream --method kivi] [-t 2] [--prompt-tokens 1500] [--most 1.25]
    scripts/bench_binding.py -m MODEL --many 16      texts a second of generate_many over those of generate

Generates twice behind a prompt, from the main thread and from another one. Exit status 1: some median is more than
`--most` times the program's. An idle machine is needed: the machine's other work is in every figure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "examples" / "prompt.txt"


def ms_a_token(model: object, ids: list[int], n: int) -> float:
    """Of n tokens behind the prompt; the prompt and the first token are not counted."""
    stream = model.generate(ids, max_tokens=n + 1, temperature=0)  # type: ignore[attr-defined]
    next(stream)
    held, start = len(model.tokens), time.perf_counter()  # type: ignore[attr-defined]
    for _ in stream:
        pass
    return 1e3 * (time.perf_counter() - start) / (len(model.tokens) - held)  # type: ignore[attr-defined]


def child(args: argparse.Namespace) -> None:
    """Prints {where: ms a token} as JSON."""
    from ggml_kvq import Model

    out: dict[str, float] = {}
    with Model(args.model, args.method[0], n_ctx=args.n_ctx, n_threads=args.threads) as model:
        ids = model.tokenize(Path(args.prompt).read_text(), add_bos=True)

        def twice(where: str) -> None:
            for call in ("first", "second"):
                out[f"{where}, {call}"] = ms_a_token(model, ids, args.tokens)

        twice("main")
        other = threading.Thread(target=twice, args=("thread",))
        other.start()
        other.join()
    print(json.dumps(out))


def of_program(args: argparse.Namespace, method: str, prompt: str) -> float:
    """llama-completion's time for evaluating and sampling, as generate does both."""
    command = [
        sys.executable,
        "-c",
        "from ggml_kvq.launch.launcher import llama_completion; llama_completion()",
        "-m",
        args.model,
        "--kv-method",
        "none" if method == "upstream" else method,
        "-f",
        prompt,
        "-n",
        str(args.tokens + 1),
    ]
    command += ["-t", str(args.threads), "-c", str(args.n_ctx), "-no-cnv", "--temp", "0", "--ignore-eos"]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, errors="replace", check=True)
    evaluated = re.search(r"(?<!prompt )\beval time = +([\d.]+) ms / +(\d+) runs", done.stderr)
    sampled = re.search(r"sampling time = +([\d.]+) ms", done.stderr)
    if not evaluated or not sampled:
        raise SystemExit(f"no eval and sampling time in what llama-completion printed:\n{done.stderr[-2000:]}")
    return (float(evaluated[1]) + float(sampled[1])) / int(evaluated[2])


def of_binding(args: argparse.Namespace, method: str, prompt: str) -> dict[str, float]:
    command = [sys.executable, __file__, "-m", args.model, "--method", method, "--prompt", prompt]
    command += ["-t", str(args.threads), "--n-ctx", str(args.n_ctx), "--tokens", str(args.tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def texts_a_second(args: argparse.Namespace, method: str) -> tuple[float, float]:
    """Of 2 * args.many prompts: one after the other, and args.many at once."""
    from ggml_kvq import Model

    rng, seconds = np.random.default_rng(0), []
    for n_seq_max in (1, args.many):
        with Model(args.model, method, n_ctx=512 * n_seq_max, n_seq_max=n_seq_max, n_threads=args.threads) as model:
            prompts = [rng.integers(300, min(model.n_vocab, 4000), 128).tolist() for _ in range(2 * args.many)]
            model.generate_many(prompts[:1], max_tokens=4, temperature=0)  # what a first call costs
            start = time.perf_counter()
            model.generate_many(prompts, max_tokens=args.tokens, temperature=0)
            seconds.append(time.perf_counter() - start)
    return len(prompts) / seconds[0], len(prompts) / seconds[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--method", action="append", help="default: upstream, kivi and auto")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=1500, help="about so many, at 4 characters each")
    parser.add_argument("--text", default=str(TEXT), help="file that the prompt is the beginning of, repeated")
    parser.add_argument("--n-ctx", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=float, default=1.25, help="times the program's figure")
    parser.add_argument("--many", type=int, help="sequences of one context: texts a second instead")
    parser.add_argument("--prompt", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.prompt:
        child(args)
        return 0
    if args.many:
        for method in args.method or ["upstream", "kivi", "auto"]:
            one, many = texts_a_second(args, method)
            print(f"  {method:<10} texts a second: {one:.2f} one by one, {many:.2f} at once, {many / one:.2f} times")
        return 0
    worst = 0.0
    print(
        f"{Path(args.model).name}, {args.threads} of {os.cpu_count()} CPUs, median of {args.rounds} rounds, ms a token"
    )
    with tempfile.TemporaryDirectory() as folder:
        prompt = str(Path(folder) / "prompt.txt")
        text, n = Path(args.text).read_text(), 4 * args.prompt_tokens
        Path(prompt).write_text((text * (n // len(text) + 1))[:n])
        for method in args.method or ["upstream", "kivi", "auto"]:
            program: list[float] = []
            binding: dict[str, list[float]] = {}
            for _ in range(args.rounds):
                program.append(of_program(args, method, prompt))
                for where, ms in of_binding(args, method, prompt).items():
                    binding.setdefault(where, []).append(ms)
            base = statistics.median(program)
            print(f"  {method:<10} llama-completion   {base:7.2f}")
            for where, ms_all in binding.items():
                ms = statistics.median(ms_all)
                worst = max(worst, ms / base)
                print(f"  {'':<10} {where:<18} {ms:7.2f}  {ms / base:5.2f} times")
    return int(worst > args.most)


if __name__ == "__main__":
    raise SystemExit(main())
