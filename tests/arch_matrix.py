#!/usr/bin/env python3
"""Random tiny models of every architecture of the built llama.cpp: our cache against llama.cpp's own.

    python tests/arch_matrix.py                          the whole table, as tests/test_archs.py runs it
    python tests/arch_matrix.py --arch 'qwen35|mamba' --method f16 --verbose
    python tests/arch_matrix.py --device KVQ0 --reference CUDA0

An architecture is a process (tests/archs/arch_matrix.cpp). A process that dies fails the row of the method it was in;
another process goes on with the methods behind it. Standard library only: scripts/gpu_check.sh runs this where nothing
is installed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import arch_models

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("f16", "kivi:bits=4", "higgs:bits=4", "aqua:predictor=none,bits=4", "specache:near=higgs,prompt=near")


@dataclass(frozen=True)
class Row:
    """What one method gave on one architecture."""

    arch: str
    method: str
    kind: str  # nmse, refused, failed, aborted
    nmse: float = float("nan")
    reason: str = ""  # one line; of an abort the last one of stderr
    output: str = ""
    apart: tuple[float, float] = (
        float("nan"),
        float("nan"),
    )  # how far keys of one token are apart: of text, of an image

    def __str__(self) -> str:
        value = f"{self.nmse:.2e}" if self.kind == "nmse" else f"{self.kind}: {self.reason}"
        return f"{self.arch:<18} {self.method:<28} {value}"


@dataclass(frozen=True)
class Setup:
    """Where the program and the libraries are, and what is compared with what."""

    program: Path
    lib: Path
    backend: Path
    device: str = "KVQ0"
    reference: str = "CPU"
    timeout: float = 60.0
    image: bool = False  # an image among the tokens: models with M-RoPE only
    same: bool = False  # all tokens are the same one: fills Row.apart

    def env(self) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("KVQ_", "LLAMA_ARG_")) or k == "KVQ_ISA"}
        paths = [str(self.lib), *filter(None, [env.get("LD_LIBRARY_PATH")])]
        more = {
            "KVQ_LIB_DIR": str(self.lib),
            "GGML_BACKEND_PATH": str(self.backend),
            "LD_LIBRARY_PATH": ":".join(paths),
            "GGML_NO_BACKTRACE": "1",
        }
        if self.image:
            more["KVQ_MATRIX_IMAGE"] = "1"
        if self.same:
            more["KVQ_MATRIX_SAME"] = "1"
        return {**env, **more, "OMP_NUM_THREADS": "1"}


def source() -> Path:
    """llama.cpp's source: $LLAMA_CPP_DIR, else the pinned one."""
    given = os.environ.get("LLAMA_CPP_DIR")
    if given:
        return Path(given)
    r = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "fetch_llama_cpp.py")], check=True, capture_output=True, text=True
    )
    return Path(r.stdout.strip())


def compile_program(lib: Path, out: Path, file: Path = ROOT / "tests" / "archs" / "arch_matrix.cpp") -> Path:
    """Compiles a program against the libraries in `lib`. CalledProcessError when that fails."""
    tree = source()
    includes = [f"-I{tree / folder}" for folder in ("include", "ggml/include", "src")]
    found = [sorted(lib.glob(f"lib{stem}.so*"))[0] for stem in ("llama", "ggml", "ggml-base")]
    link = [*map(str, found), "-ldl", f"-Wl,-rpath,{lib}", "-Wl,--allow-shlib-undefined"]
    subprocess.run(
        [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", *includes, str(file), *link, "-o", str(out)], check=True
    )
    return out


def architectures(setup: Setup) -> list[str]:
    """Every name this libllama knows."""
    r = subprocess.run(
        [str(setup.program), "--list"], check=True, capture_output=True, text=True, env=setup.env(), timeout=60
    )
    return r.stdout.split()


def refusal(lines: Sequence[str]) -> str:
    """The line of ours that says why, else the last line of llama.cpp's."""
    ours = [line.removeprefix("ggml-kvq: error: ") for line in lines if line.startswith("ggml-kvq: error: ")]
    return ours[0] if ours else "unexplained: " + (lines[-1] if lines else "nothing printed")


def read_rows(arch: str, methods: Sequence[str], output: str, code: int) -> list[Row]:
    """Rows that the program's stderr tells of; of a program that died the last is the method it died in."""
    rows: list[Row] = []
    now, since, apart = "reference", list[str](), (float("nan"), float("nan"))
    for line in output.splitlines():
        if line.startswith("@begin "):
            now, since = line.split(" ", 1)[1], []
        elif line.startswith("@reference failed "):
            reason = line.split(" ", 2)[2] + ": " + next((text for text in since if "error" in text), "")
            return [Row(arch, m, "failed", reason="llama.cpp alone: " + reason, output=output) for m in methods]
        elif line.startswith("@same "):
            apart = (float(line.split()[1]), float(line.split()[2]))
        elif line.startswith("@end "):
            _, method, kind, *rest = line.split(" ", 3)
            text = rest[0] if rest else ""
            nmse = float(text) if kind == "nmse" else float("nan")
            reason = text if kind == "failed" else refusal(since) if kind == "refused" else ""
            rows.append(Row(arch, method, kind, nmse, reason, output, apart))
            now = ""
        elif line.strip() and not line.startswith("@"):
            since.append(line)
    if now == "reference" and code:
        reason = (since[-1] if since else "") + f" (exit code {code})"
        return [Row(arch, m, "failed", reason="llama.cpp alone: " + reason, output=output) for m in methods]
    if now and code:
        rows.append(
            Row(arch, now, "aborted", reason=(since[-1] if since else "") + f" (exit code {code})", output=output)
        )
    return rows


def run_architecture(
    setup: Setup, arch: str, methods: Sequence[str] = METHODS, extra: dict[str, object] | None = None
) -> list[Row]:
    """One row a method."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        meta = Path(folder) / "meta.gguf"
        meta.write_bytes(arch_models.gguf(arch_models.metadata(arch, extra)))
        left = list(methods)
        while left:
            argv = [str(setup.program), str(meta), setup.reference, setup.device, *left]
            try:
                r = subprocess.run(
                    argv,
                    check=False,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    env=setup.env(),
                    timeout=setup.timeout,
                )
                output, code = r.stdout, r.returncode
            except subprocess.TimeoutExpired as e:
                output = e.stdout.decode(errors="replace") if isinstance(e.stdout, bytes) else e.stdout or ""
                output, code = output + f"\nno end after {setup.timeout:.0f} s", 124
            new = read_rows(arch, left, output, code)
            rows += new or [Row(arch, m, "aborted", reason=f"exit code {code}", output=output) for m in left]
            left = left[len(new) :] if new else []
    return rows


def run_all(setup: Setup, archs: Sequence[str], methods: Sequence[str] = METHODS, jobs: int = 2) -> list[Row]:
    """Rows of all architectures, `jobs` processes at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        return [row for rows in pool.map(lambda a: run_architecture(setup, a, methods), archs) for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default=".", help="regular expression of whole names")
    parser.add_argument(
        "--method", action="append", help=f"NAME or NAME:KEY=VALUE,...; repeatable; default: {' '.join(METHODS)}"
    )
    parser.add_argument("--device", default="KVQ0")
    parser.add_argument("--reference", default="CPU", help="device of llama.cpp's own cache: CPU or CUDA0")
    parser.add_argument("--lib", type=Path, help="folder of libllama.so; default: the installed package's")
    parser.add_argument("--backend", type=Path, help="libggml-kvq.so; default: beside it")
    parser.add_argument("--program", type=Path, help="compiled arch_matrix; default: compiled now")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--image", action="store_true", help="an image among the tokens: for models with M-RoPE")
    parser.add_argument(
        "--check", action="store_true", help="exit status 1 unless all is as tests/arch_expected.py has it"
    )
    parser.add_argument("--verbose", action="store_true", help="everything the programs print")
    args = parser.parse_args()
    lib = args.lib
    if lib is None:
        from ggml_kvq import _paths

        lib = _paths.lib_dir()
    lib = lib.resolve()
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        program = args.program or compile_program(lib, Path(folder) / "arch_matrix")
        setup = Setup(
            program,
            lib,
            (args.backend or lib / "libggml-kvq.so").resolve(),
            args.device,
            args.reference,
            image=args.image,
        )
        archs = [a for a in architectures(setup) if args.arch == "." or re.fullmatch(args.arch, a)]
        rows = run_all(setup, archs, args.method or METHODS, args.jobs)
    seen = ""
    for row in rows:
        if args.verbose and row.output != seen:
            print(row.output)
        seen = row.output
        print(row)
    print(f"{len(archs)} architectures in {time.time() - start:.0f} s")
    if args.check:
        import arch_expected

        return 1 if arch_expected.report(rows) else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
