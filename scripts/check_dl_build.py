#!/usr/bin/env python3
"""Our caches in a llama.cpp built as its official archives and Ollama's llama-server are: backends are modules.

    scripts/check_dl_build.py -m MODEL [--cache kivi --cache auto] [-d 0,512] [-t 2] [--rounds 5]

builds libggml with GGML_BACKEND_DL and variants of the CPU backend, without OpenMP as Ollama does, and runs llama-bench
in that build and in this installation in turn. Printed are tokens a second, each cache's ratio to the f16 cache of the
same build (the median of the rounds' own ratios), and how far that ratio is from the one here. Exit code 1 when one is
more than 5 % below. An idle machine is needed. --openmp builds with OpenMP, as the official archives are; --all builds
all variants and not two.

The first repetition of each process is left out. llama-bench starts threads for ggml's CPU backend. Without OpenMP they
spin for about 0.3 seconds before they sleep; a step of ours runs in threads of its own and has to share the cores with
them until then.

Only libggml and the modules differ between such a build and one without modules: libllama and the programs are compiled
from the same text with the same options. So those are taken from this installation, and the build takes two minutes.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import fetch_llama_cpp as fetch  # noqa: E402
from ggml_kvq import _paths, bench  # noqa: E402
from ggml_kvq.evaluate.specs import CacheSpec, parse_built  # noqa: E402

# Upstream's names of variants and what a CPU must have for them, the best first; without AMX, which this compiler may
# get wrong (cmake/amx_probe.cmake).
VARIANTS = (
    ("zen4", ("avx512f", "avx512vbmi", "avx512_vnni", "avx512_bf16")),
    ("cooperlake", ("avx512f", "avx512_vnni", "avx512_bf16")),
    ("icelake", ("avx512f", "avx512vbmi", "avx512_vnni")),
    ("cascadelake", ("avx512f", "avx512_vnni")),
    ("skylakex", ("avx512f",)),
    ("haswell", ("avx2", "bmi2", "fma")),
    ("sandybridge", ("avx",)),
)
PROGRAMS = ("llama-server", "llama-bench", "llama-completion")
SETTINGS = {
    "CMAKE_BUILD_TYPE": "Release",
    "CMAKE_LIBRARY_OUTPUT_DIRECTORY": "bin",
    "CMAKE_RUNTIME_OUTPUT_DIRECTORY": "bin",
    "CMAKE_INSTALL_RPATH": "$ORIGIN",
    "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
    "BUILD_SHARED_LIBS": "ON",
    "GGML_BACKEND_DL": "ON",
    "GGML_CPU_ALL_VARIANTS": "ON",
    "GGML_NATIVE": "OFF",
    "GGML_CCACHE": "OFF",
    **dict.fromkeys(("LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_TOOLS", "LLAMA_BUILD_SERVER"), "OFF"),
    **dict.fromkeys(("LLAMA_BUILD_APP", "LLAMA_BUILD_UI", "LLAMA_USE_PREBUILT_UI", "LLAMA_OPENSSL"), "OFF"),
}
NEAR = 0.05


class BuildError(Exception):
    """One line: what could not be built."""


def variants() -> list[str]:
    """The plain one and the best for this CPU: llama.cpp has to choose."""
    has = set(Path("/proc/cpuinfo").read_text().split())
    return ["x64", *[name for name, needs in VARIANTS if has.issuperset(needs)][:1]]


def build(openmp: bool, every: bool = False, cache: Path | None = None) -> Path:
    """Folder with llama.cpp's programs over a libggml whose backends are modules; kept in the cache."""
    cache = (cache or fetch.default_cache()).absolute()
    source = fetch.ensure_source(cache)
    names = variants()
    folder = cache / f"dl-{fetch.COMMIT[:9]}-{'openmp' if openmp else 'threads'}-{'all' if every else names[-1]}"
    folder.mkdir(parents=True, exist_ok=True)
    settings = {**SETTINGS, "GGML_OPENMP": "ON" if openmp else "OFF"}
    for key in ("CMAKE_LIBRARY_OUTPUT_DIRECTORY", "CMAKE_RUNTIME_OUTPUT_DIRECTORY"):
        settings[key] = str(folder / "bin")
    targets = ["ggml"] if every else ["ggml-base", *(f"ggml-cpu-{name}" for name in names)]
    commands: list[list[str | Path]] = [
        ["cmake", "-S", source, "-B", folder, "-G", "Ninja", *(f"-D{k}={v}" for k, v in settings.items())],
        ["cmake", "--build", folder, "--target", *targets],
    ]
    if not every:  # upstream's target ggml waits for all variants
        commands.append(registry(source / "ggml", folder / "bin"))
    with open(folder / "lock", "w") as lock, open(folder / "log", "w") as log:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in commands:
            if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode:
                raise BuildError(f"`{' '.join(map(str, command[:3]))}` failed, see {folder / 'log'}")
        stage(folder)
    return folder / "stage"


def registry(ggml: Path, folder: Path) -> list[str | Path]:
    """The command that makes libggml.so, as upstream's CMake does with GGML_BACKEND_DL."""
    defined = ("GGML_BACKEND_DL", "GGML_BACKEND_SHARED", "GGML_SHARED", "GGML_BUILD", "_GNU_SOURCE", "NDEBUG")
    files = [ggml / "src" / f"ggml-backend-{name}.cpp" for name in ("dl", "reg")]
    flags = ["-std=gnu++17", "-O3", "-fPIC", "-shared", *(f"-D{name}" for name in defined)]
    linked = [f"-L{folder}", "-lggml-base", "-ldl", "-Wl,-soname,libggml.so.0", "-Wl,-rpath,$ORIGIN"]
    include = [f"-I{ggml / part}" for part in ("include", "src")]
    return ["c++", *flags, *include, *files, "-o", folder / "libggml.so.0.0.0", *linked]


def stage(folder: Path) -> None:
    """Programs and libraries that depend on libggml from here, libggml and its modules from the build."""
    target = folder / "stage"
    target.mkdir(exist_ok=True)
    new = {f.name: f for f in (folder / "bin").glob("libggml*.so*") if not f.is_symlink()}
    built = {name.partition(".so")[0] for name in new}
    for name, file in new.items():
        stem, _, version = name.partition(".so")
        plain = stem.startswith("libggml-cpu-") or not version  # llama.cpp looks for modules by that name
        copy(file, target / (f"{stem}.so" if plain else f"{stem}.so.{version.split('.')[1]}"))
    for file in sorted(_paths.lib_dir().glob("lib*.so*")):
        if file.name.partition(".so")[0] not in built and not file.name.startswith("libggml"):
            copy(file, target / file.name)
    for name in PROGRAMS:
        copy(_paths.program(name), target / name)


def copy(file: Path, target: Path) -> None:
    """Whole or not at all: another process may run what stands there. A link would lead $ORIGIN elsewhere."""
    at = (file.stat().st_size, int(file.stat().st_mtime))
    if target.exists() and (target.stat().st_size, int(target.stat().st_mtime)) == at:
        return
    part = target.with_name(target.name + ".part")
    shutil.copy2(file, part)
    part.rename(target)


def busy_cores() -> float:
    """By other work, in one second."""

    def idle() -> float:
        ticks = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        return (ticks[3] + ticks[4]) / os.sysconf("SC_CLK_TCK")  # idle, and waiting for a disk

    before, begin = idle(), time.monotonic()
    time.sleep(1)
    return max(0.0, (os.cpu_count() or 1) - (idle() - before) / (time.monotonic() - begin))


def tokens_a_second(model: Path, lib_dir: Path, spec: CacheSpec, settings: bench.Settings, depth: int) -> list[float]:
    os.environ["KVQ_LIB_DIR"] = str(lib_dir)
    row = bench._once(*bench.command(model, spec, settings, depth, "tg"))
    return [float(x) for x in row["samples_ts"]][1:]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("-m", "--model", type=Path, help="without it the build alone is made, and its folder printed")
    parser.add_argument("--cache", action="append", help="METHOD or METHOD:options; default: kivi, auto")
    parser.add_argument("-d", "--depths", default="0,512", help="tokens before (default: %(default)s)")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-n", "--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--openmp", action="store_true", help="build with OpenMP")
    parser.add_argument("--all", action="store_true", help="build all variants of the CPU backend")
    args = parser.parse_args()
    here = _paths.lib_dir()
    os.environ["KVQ_BACKEND"] = str(_paths.backend())
    try:
        folder = build(args.openmp, args.all)
    except (BuildError, fetch.FetchError) as e:
        print(f"check_dl_build: error: {e}", file=sys.stderr)
        return 1
    if not args.model:
        print(folder)
        return 0
    specs = [parse_built(text, "speed") for text in ("f16", *(args.cache or ["kivi", "auto"]))]
    settings = bench.Settings(n_gen=args.tokens, n_threads=args.threads, reps=4)
    bench.measure(args.model, specs, args.threads)
    print(
        f"{args.model.name}, {args.threads} threads, medians of {args.rounds} rounds; {'with' if args.openmp else 'no'}"
        " OpenMP in the build with modules"
    )
    if (busy := busy_cores()) > 0.1:
        print(f"the machine is not idle: other work keeps {busy:.1f} cores busy, and these figures mean little")
    print(f"{'depth':>5}  {'cache':16} {'here':>8} {'ratio':>6} {'modules':>8} {'ratio':>6} {'between':>8}")
    far = 0
    for depth in (int(d) for d in args.depths.split(",")):
        speeds: dict[tuple[Path, str], list[float]] = {}  # a median of each round
        for _ in range(args.rounds):
            for lib_dir in (here, folder):
                for spec in specs:
                    found = tokens_a_second(args.model.absolute(), lib_dir, spec, settings, depth)
                    speeds.setdefault((lib_dir, spec.label), []).append(statistics.median(found))
        for spec in specs:
            median = [statistics.median(speeds[lib_dir, spec.label]) for lib_dir in (here, folder)]
            ratios = [
                statistics.median(
                    x / f16 for x, f16 in zip(speeds[d, spec.label], speeds[d, specs[0].label], strict=True)
                )
                for d in (here, folder)
            ]
            between = ratios[1] / ratios[0] - 1
            far += between < -NEAR
            print(
                f"{depth:5}  {spec.label:16} {median[0]:8.2f} {ratios[0]:5.2f}x {median[1]:8.2f} {ratios[1]:5.2f}x"
                f" {100 * between:+7.1f}%",
                flush=True,
            )
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
