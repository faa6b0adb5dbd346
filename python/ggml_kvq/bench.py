"""Speed of KV caches on a model, side by side: unmodified llama-bench once per cache and round, caches in turn,
medians over all rounds.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import _paths, default_means, gguf_header, methods, resolver
from .errors import KvqError
from .evaluate.results import provenance, table
from .evaluate.specs import CacheSpec
from .progress import Line

Row = dict[str, Any]
CPU_DEVICE, KVQ_DEVICE = "none", "KVQ0"
KEPT = ("KVQ_ISA", "KVQ_LIB_DIR", "KVQ_CACHE_DIR")  # where things are; what they shall do the specs say


@dataclass(frozen=True)
class Settings:
    """n_gen, n_prompt, depths: tokens. reps: repetitions within a process; rounds: times that the caches alternate."""

    depths: tuple[int, ...] = (0, 4096)
    n_gen: int = 32
    n_prompt: int = 0
    n_ubatch: int = 512
    n_threads: int = 2
    reps: int = 2
    rounds: int = 3
    device: str = ""


def command(model: Path, spec: CacheSpec, s: Settings, depth: int, test: str) -> tuple[list[str], dict[str, str]]:
    """(argv, environment on top of ours) of one llama-bench run. test: tg (generation) or pp (prompt)."""
    argv = [
        str(_paths.program("llama-bench")),
        "-m",
        str(model),
        "-t",
        str(s.n_threads),
        "-ub",
        str(s.n_ubatch),
        "-fa",
        "1",
        "-d",
        str(depth),
    ]
    argv += [
        "-r",
        str(s.reps),
        "-o",
        "json",
        "-n",
        str(s.n_gen if test == "tg" else 0),
        "-p",
        str(s.n_prompt if test == "pp" else 0),
    ]
    if spec.method is None:
        return [*argv, "-ctk", spec.type_k, "-ctv", spec.type_v, *(["-dev", s.device or CPU_DEVICE])], {}
    env = {"GGML_BACKEND_PATH": str(_paths.backend()), "KVQ_METHOD": spec.method, "KVQ_MODEL": str(model)}
    env |= {"KVQ_OPTS": spec.options} if spec.options else {}
    env |= {"KVQ_CONFIG": str(Path(spec.config).absolute())} if spec.config else {}
    return [*argv, "-dev", KVQ_DEVICE], env


def _once(argv: list[str], env: dict[str, str]) -> Row:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KVQ_", "LLAMA_ARG_")) or k in KEPT}
    done = subprocess.run(argv, env={**clean, **env}, capture_output=True, text=True)
    if done.returncode:
        ours = "ggml-kvq: error: "
        lines = done.stderr.strip().splitlines()
        refused = next((x.partition(ours)[2] for x in lines if ours in x), "")
        raise KvqError(refused or f"llama-bench ended with {done.returncode}: {' '.join(lines[-2:])}")
    row: Row = json.loads(done.stdout)[0]
    return row


def measure(model: Path, specs: Sequence[CacheSpec], n_threads: int) -> None:
    """Means of the model, where a cache goes better with them and nobody gave any: eval and Model have them too."""
    header = gguf_header.read(model)
    found = [
        resolver.resolve(methods.library, resolver.Request(resolver.BY_FLAGS, spec.method, spec.options), header)
        for spec in specs
        if spec.method is not None and not spec.config
    ]
    for kind, insist in sorted({(x.first_use, x.insists) for x in found if x.wants_means}):
        line = Line()
        _, why = default_means.ensure(
            model,
            lambda text: print(f"ggml-kvq bench: {text}", file=sys.stderr),
            n_threads,
            line,
            kind=kind,
            insist=insist,
        )
        line.clear()
        if why and insist:
            raise KvqError(f"{default_means.asked(kind)} {why}")
        if why:
            print(f"ggml-kvq bench: no means are taken off keys and values: {why}", file=sys.stderr)


def check(model: Path, specs: Sequence[CacheSpec], s: Settings) -> None:
    """KvqError for a cache that llama-bench cannot have on this model: each generates one token."""
    line, one = Line(), replace(s, n_gen=1, reps=1)
    for spec in specs:
        line(f"first try: {spec.label}")
        try:
            _once(*command(model, spec, one, 0, "tg"))
        except KvqError as e:
            line.clear()
            raise KvqError(f"cache {spec.label}: {spec.in_words(str(e))}") from e
    line.clear()


def run(model: Path, specs: Sequence[CacheSpec], s: Settings) -> Iterator[Row]:
    """One row per test, depth and cache, as llama-bench -o jsonl writes them, with cache, kv_method, kv_opts, ratio
    (to the first cache), command.
    """
    line = Line()
    tests = [("tg", d) for d in s.depths if s.n_gen] + [("pp", d) for d in s.depths if s.n_prompt]
    for test, depth in tests:
        samples: dict[str, list[float]] = {spec.label: [] for spec in specs}
        last: dict[str, Row] = {}
        for n in range(s.rounds):
            for spec in specs:
                line(f"{test} at {depth}: round {n + 1}/{s.rounds}, {spec.label}")
                last[spec.label] = _once(*command(model, spec, s, depth, test))
                samples[spec.label] += last[spec.label]["samples_ts"]
        base = statistics.median(samples[specs[0].label])
        for spec in specs:
            argv, env = command(model, spec, s, depth, test)
            median = statistics.median(samples[spec.label])
            spread = statistics.stdev(samples[spec.label]) if len(samples[spec.label]) > 1 else 0.0
            yield {
                **last[spec.label],
                **provenance(),
                "samples_ts": samples[spec.label],
                "avg_ts": median,
                "stddev_ts": spread,
                "cache": spec.label,
                "kv_method": spec.method,
                "kv_opts": spec.options,
                "ratio": median / base,
                "command": shlex.join([*(f"{k}={v}" for k, v in env.items()), *argv]),
            }
        line.clear()


def summary(rows: Sequence[Row], *, markdown: bool = False) -> str:
    """Table of medians; ratio is to the first cache of the same test."""
    cells = [
        [
            f"{'tg' if r['n_gen'] else 'pp'}{r['n_gen'] or r['n_prompt']} @ {r['n_depth']}",
            r["cache"],
            f"{r['avg_ts']:.2f}",
            f"{r['stddev_ts']:.2f}",
            f"{r['ratio']:.2f}x",
        ]
        for r in rows
    ]
    return table(["test", "cache", "tokens/s (median)", "stddev", "ratio"], cells, markdown=markdown)
