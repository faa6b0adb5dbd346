#!/usr/bin/env python3
"""Write the numbers of ggml-kvq/host/layouts.inc: compile its lines against every known llama.cpp and run that.

    scripts/make_layouts.py                     trees of scripts/fetch_llama_cpp.py, fetched where they are not cached
    scripts/make_layouts.py --cuda              those of host/cuda/cuda_layouts.inc; needs nvcc, and no GPU
    scripts/make_layouts.py --check             compare only; exit code 1 and one line a difference
    scripts/make_layouts.py --check TREE ...    these source trees alone (in --check, their versions must be known)

A number that the file calls the same everywhere and that is not is an error: that line has to become a KVQ_DIFFERS.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import fetch_llama_cpp as fetch  # noqa: E402

FILE = ROOT / "ggml-kvq" / "host" / "layouts.inc"
CUDA_FILE = FILE.parent / "cuda" / "cuda_layouts.inc"
SAME = ("KVQ_MEMBER", "KVQ_SIZE", "KVQ_CONSTANT")
HEADERS = """
#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "gguf.h"
"""
CUDA_HEADERS = """
#define GGML_CUDA_USE_GRAPHS
#include "ggml-cuda/common.cuh"
"""
PROBE = """
#include <cstddef>
#include <cstdio>
int main() {
#ifdef GGML_BACKEND_API_VERSION
    printf("api %d\\n", (int) GGML_BACKEND_API_VERSION);
#endif
#define KVQ_MEMBER(type, member, n) printf("%s %zu\\n", "KVQ_MEMBER(" #type ", " #member, offsetof(type, member));
#define KVQ_SIZE(type, n) printf("%s %zu\\n", "KVQ_SIZE(" #type, sizeof(type));
#define KVQ_CONSTANT(name, n) printf("%s %d\\n", "KVQ_CONSTANT(" #name, (int) name);
#define KVQ_DIFFERS(name, what) printf("differs %d\\n", (int) (what));
#define KVQ_LAYOUT_OF(...)
#include "LAYOUTS"
}
"""


class LayoutError(Exception):
    """One line: what the tree has or lacks."""


# Nothing proves a private context at run time, so its rows are of versions that have run on a GPU.
RAN_ON_A_GPU = ((0, 25, 3), (0, 26, 0))


def version_of(tree: Path) -> tuple[int, ...]:
    text = (tree / "ggml" / "CMakeLists.txt").read_text()
    found = re.findall(r"^set\(GGML_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)\)", text, re.M)
    if len(found) != 3:
        raise LayoutError(f"{tree} names no version of ggml")
    return tuple(int(x) for x in found)


def numbers_of(tree: Path, file: Path) -> tuple[dict[str, int], list[int]]:
    """({line up to its number: number}, [API number, differing numbers]) of one source tree."""
    cuda = file == CUDA_FILE
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if cuda and not nvcc:
        raise LayoutError("there is no nvcc here, which --cuda needs; set CUDACXX to its path")
    with tempfile.TemporaryDirectory() as scratch:
        source, program = Path(scratch) / f"probe.{'cu' if cuda else 'cpp'}", Path(scratch) / "probe"
        source.write_text((CUDA_HEADERS if cuda else HEADERS) + PROBE.replace("LAYOUTS", str(file)))
        include = [f"-I{tree / 'ggml' / part}" for part in ("include", "src")]
        compiler = ["c++", "-O1"]
        if cuda and nvcc:
            compiler = [
                nvcc,
                "-arch=sm_80",
                "-Xcompiler",
                "-no-pie",
                "-Xlinker",
                "--unresolved-symbols=ignore-all",
                f"-I{ROOT / 'cmake' / 'without_cublas'}",
            ]
        command = [*compiler, "-std=c++17", "-w", *include, str(source), "-o", str(program)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = re.findall(r"error: .*", done.stderr) or [done.stderr[-300:]]
            raise LayoutError(f"{tree}: {errors[0]}")
        ran = subprocess.run([str(program)], capture_output=True, text=True, check=False)
        if ran.returncode:
            raise LayoutError(f"{tree}: the probe ended with {ran.returncode}: {ran.stderr.strip()[-300:]}")
    same: dict[str, int] = {}
    row: list[int] = []
    for line in ran.stdout.splitlines():
        name, _, number = line.rpartition(" ")
        if name in ("api", "differs"):
            row.append(int(number))
        else:
            same[name] = int(number)
    return same, row


def written(text: str) -> tuple[dict[str, int], dict[str, list[int]]]:
    """What the file says: numbers that are the same, and rows by version."""
    names = "|".join(SAME)
    same = {m[1]: int(m[2]) for m in re.finditer(rf"^((?:{names})\(.*), (-?\d+)\)$", text, re.M)}
    rows = {
        m[1]: [int(x) for x in m[2].split(", ")]
        for m in re.finditer(r'^KVQ_LAYOUT_OF\("([\d.]+)", ([\d, ]+)\)$', text, re.M)
    }
    return same, rows


def render(text: str, same: dict[str, int], rows: dict[tuple[int, ...], list[int]]) -> str:
    names = "|".join(SAME)
    text = re.sub(rf"^((?:{names})\(.*), -?\d+\)$", lambda m: f"{m[1]}, {same[m[1]]})", text, flags=re.M)
    text = re.sub(r"^KVQ_LAYOUT_OF\(.*\)\n", "", text, flags=re.M)
    lines = [
        f'KVQ_LAYOUT_OF("{".".join(map(str, version))}", {", ".join(map(str, row))})'
        for version, row in sorted(rows.items())
    ]
    return text.rstrip("\n") + "\n" + "\n".join(lines) + "\n"


def all_trees() -> list[Path]:
    trees = []
    for version in fetch.known():
        fetch.choose(version)
        trees.append(fetch.ensure_source(fetch.default_cache().absolute()))
    return trees


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs="*", type=Path, help="llama.cpp source trees; default: all known versions")
    parser.add_argument("--cuda", action="store_true", help="the private context of ggml-cuda instead")
    parser.add_argument("--check", action="store_true", help="write nothing, tell what differs from the file")
    args = parser.parse_args()
    file = CUDA_FILE if args.cuda else FILE
    text = file.read_text()
    said_same, said_rows = written(text)
    same: dict[str, int] = {}
    rows: dict[tuple[int, ...], list[int]] = {}
    wrong = []
    try:
        for tree in args.trees or all_trees():
            version = version_of(tree)
            if args.cuda and version not in RAN_ON_A_GPU:
                continue
            name = ".".join(map(str, version))
            numbers, row = numbers_of(tree, file)
            for line, number in numbers.items():
                if same.setdefault(line, number) != number:
                    wrong.append(f"{line}) is {number} in ggml {name} and {same[line]} in another")
                if args.check and said_same.get(line) != number:
                    wrong.append(f"{line}) is {number} in ggml {name}, the file says {said_same.get(line)}")
            if rows.setdefault(version, row) != row:
                wrong.append(f"two trees of ggml {name} differ: {row} and {rows[version]}")
            if args.check and said_rows.get(name) != row:
                wrong.append(f"ggml {name} has {row}, the file says {said_rows.get(name)}")
    except (LayoutError, fetch.FetchError, OSError) as e:
        wrong.append(str(e))
    for line in wrong:
        print(f"make_layouts: {line}", file=sys.stderr)
    if not wrong and not args.check:
        file.write_text(render(text, same, rows))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
