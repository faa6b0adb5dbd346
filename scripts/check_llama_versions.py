#!/usr/bin/env python3
"""Build libggml-kvq over every supported llama.cpp and run it.

    .venv/bin/python scripts/check_llama_versions.py                       all of them, five minutes each on two cores
    .venv/bin/python scripts/check_llama_versions.py 0.3.32 --libraries    one, without its programs: half of that

For each tree (fetched and checked by fetch_llama_cpp.py): libggml-kvq and upstream's libraries, llama-completion and
llama-perplexity are built. Then: perplexity of the demo model with the tree's own f16 cache, with f16 and kivi through
KVQ0 (equal to 0.5 %; within a factor of 1.5); text and load line of llama-completion; the Python package over these
libraries, in a process of its own. Builds are kept in the cache folder, so that a second run takes seconds. Exit code 1
when a tree fails; the last lines are a table.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import fetch_llama_cpp as fetch  # noqa: E402

PINNED = fetch.VERSION
DEMO = ROOT / "models" / "kvq-demo-q8_0.gguf"
TEXT = ROOT / "tests" / "data" / "walk.txt"
PROGRAMS = ("llama-completion", "llama-perplexity")
CONTEXT, CHUNKS = 512, 3
MODEL = """
import json, sys
from ggml_kvq import Model, loader
demo, text, n_ctx, chunks = sys.argv[1], open(sys.argv[2]).read(), int(sys.argv[3]), int(sys.argv[4])
out = {"ggml": loader.libraries().base.ggml_version().decode()}
for method in ("upstream", "f16", "kivi"):
    with Model(demo, method, n_ctx=n_ctx, n_threads=2) as m:
        tokens = m.tokenize(text, add_bos=True)[: n_ctx * chunks]
        out[method] = m.perplexity(tokens, n_ubatch=128)  # earlier ones are read from codes
        out["line"], out["bits"] = (m.load_line, m.kv_stats()["bits"]) if method == "kivi" else ("", 16.0)
        m.reset()
        out["text"] = "".join(m.generate("Memory is allocated with malloc(3), which", max_tokens=24, temperature=0))
print(json.dumps(out))
"""


class Failure(Exception):
    """One line: what a tree does not do."""


@dataclass
class Row:
    """Perplexities of a tree: its own cache, f16 and kivi through KVQ0; by programs (0: not built), by Python."""

    version: str
    ggml: str
    programs: tuple[float, float, float]
    python: tuple[float, float, float]


def log_of(folder: Path, name: str, command: list[str | Path], env: dict[str, str] | None = None) -> str:
    """Run, with all output in folder/name; Failure with its last lines when it fails."""
    log = folder / name
    with open(log, "w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=env, check=False)
    text = log.read_text(errors="replace")
    if done.returncode:
        errors = [line for line in text.splitlines() if "rror" in line][:8] or text.splitlines()[-8:]
        raise Failure(f"{Path(command[0]).name} ended with {done.returncode} ({log}):\n  " + "\n  ".join(errors))
    return text


def build(version: str, cache: Path, into: Path | None, targets: list[str]) -> Path:
    """Folder with libggml-kvq.so and upstream's libraries and programs; llama.cpp is built in the cache."""
    fetch.choose(version)
    source = fetch.ensure_source(cache)
    here = hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]  # a build folder belongs to one source folder
    folder = (into or cache / "versions" / here) / version
    folder.mkdir(parents=True, exist_ok=True)
    elsewhere = [f"-DLLAMA_CPP_DIR={source}", f"-DKVQ_LLAMA_BUILD={cache / f'build-of-{version}'}"]
    where = [] if version == PINNED else elsewhere
    settings = [*where, "-DKVQ_BUILD_PROGRAMS=ON", f"-DKVQ_PROGRAMS={';'.join(targets)}", "-DCMAKE_BUILD_TYPE=Release"]
    if os.environ.get("CHECK_CXX_LAUNCHER"):  # tests/object_cache.py
        settings.append(f"-DCMAKE_CXX_COMPILER_LAUNCHER={os.environ['CHECK_CXX_LAUNCHER']}")
    log_of(folder, "configure.log", ["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", *settings])
    log_of(folder, "build.log", ["cmake", "--build", folder])
    return folder


def environment(folder: Path, **more: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KVQ_", "LLAMA_ARG_", "GGML_BACKEND_PATH"))}
    return {**env, "KVQ_LIB_DIR": str(folder / "lib"), "KVQ_BACKEND": str(folder / "lib" / "libggml-kvq.so"), **more}


def by_programs(folder: Path) -> tuple[float, float, float]:
    """Perplexities by llama-perplexity; text and load line by llama-completion."""
    bare = environment(folder)
    out = []
    for method in ("upstream", "f16", "kivi"):
        env = bare if method == "upstream" else {**bare, "GGML_BACKEND_PATH": bare["KVQ_BACKEND"], "KVQ_METHOD": method}
        device = [] if method == "upstream" else ["-dev", "KVQ0"]
        common: list[str | Path] = ["-m", DEMO, "-fa", "on", "-t", "2", *device]
        command: list[str | Path] = [folder / "lib" / "llama-perplexity", *common, "-f", TEXT, "-c", str(CONTEXT)]
        for _ in range(5):  # upstream's log thread now and then loses the last lines
            said = log_of(folder, f"perplexity-{method}.log", [*command, "--chunks", str(CHUNKS)], env)
            found = re.search(r"PPL = ([0-9.]+)", said)
            if found:
                break
        if not found:
            raise Failure(f"llama-perplexity printed no perplexity with {method}")
        out.append(float(found[1]))
        said = log_of(
            folder,
            f"completion-{method}.log",
            [folder / "lib" / "llama-completion", *common, "-p", "malloc", "-n", "32", "-no-cnv", "--temp", "0"],
            env,
        )
        if ("ggml-kvq: kivi" in said) != (method == "kivi"):
            raise Failure(
                f"llama-completion printed {'no' if method == 'kivi' else 'a'} load line of kivi with {method}"
            )
    return out[0], out[1], out[2]


def by_python(folder: Path) -> tuple[str, tuple[float, float, float]]:
    """(ggml version, perplexities) by ggml_kvq.Model over the tree's libraries."""
    said = log_of(
        folder,
        "python.log",
        [sys.executable, "-c", MODEL, str(DEMO), str(TEXT), str(CONTEXT), str(CHUNKS)],
        environment(folder, KVQ_QUIET="1"),
    )
    got = json.loads(said.splitlines()[-1])
    if "kivi" not in got["line"] or not got["text"] or not 2 < got["bits"] < 8:
        raise Failure(f"Model gave the load line {got['line']!r}, {got['bits']} bits and the text {got['text']!r}")
    return got["ggml"], (got["upstream"], got["f16"], got["kivi"])


def judge(what: str, ppl: tuple[float, float, float]) -> None:
    own, f16, kivi = ppl
    if abs(f16 / own - 1) > 0.005:
        raise Failure(f"{what}: perplexity {f16:.4f} of f16 through KVQ0, {own:.4f} of the tree's own cache")
    if kivi == f16 or not 0.9 < kivi / own < 1.5:
        raise Failure(f"{what}: perplexity {kivi:.4f} of kivi, {own:.4f} of the tree's own cache")


def check(version: str, cache: Path, into: Path | None, libraries: bool) -> Row:
    folder = build(version, cache, into, ["llama"] if libraries else list(PROGRAMS))
    ggml, python = by_python(folder)
    judge("Model", python)
    programs = (0.0, 0.0, 0.0) if libraries else by_programs(folder)
    if not libraries:
        judge("llama-perplexity", programs)
    return Row(version, ggml, programs, python)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "versions", nargs="*", help=f"of llama-cpp-python's sdist; default: {PINNED} and {', '.join(fetch.OLDER)}"
    )
    parser.add_argument("--libraries", action="store_true", help="build no programs: Python alone runs")
    parser.add_argument("--build", type=Path, help="where libggml-kvq is built; default: a folder in the cache")
    parser.add_argument(
        "--cache", type=Path, default=fetch.default_cache(), help="default: %(default)s (KVQ_CACHE_DIR)"
    )
    args = parser.parse_args()
    rows, failed = [], 0
    for version in args.versions or [PINNED, *fetch.OLDER]:
        print(f"{version}: ...", file=sys.stderr, flush=True)
        try:
            rows.append(check(version, args.cache.absolute(), args.build, args.libraries))
        except (Failure, fetch.FetchError) as e:
            print(f"{version}: FAILED: {e}", file=sys.stderr, flush=True)
            failed += 1
    print(
        "| llama-cpp-python | ggml | programs: own | f16 | kivi | Python: own | f16 | kivi |\n"
        "|---|---|---:|---:|---:|---:|---:|---:|"
    )
    for r in rows:
        print(
            f"| {r.version} | {r.ggml} | "
            + " | ".join(f"{x:.4f}" if x else "-" for x in (*r.programs, *r.python))
            + " |"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
