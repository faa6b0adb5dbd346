"""Every CUDA source compiles, on machines without a GPU too. nvcc is not needed to use the CPU build: without it
this is skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import object_cache
import pytest
from cuda_sources import instances, write

ROOT = Path(__file__).resolve().parents[1] / "ggml-kvq"
NVCC = os.environ.get("CUDACXX") or shutil.which("nvcc")
WRITTEN = tempfile.TemporaryDirectory(prefix="ggml-kvq-instances-")
INSTANCES = instances(Path(WRITTEN.name))
SOURCES = sorted([*(ROOT / "cuda").rglob("*.cu"), *INSTANCES], key=lambda p: p.name)


def test_there_are_kernels() -> None:
    names = {p.name for p in SOURCES}
    assert {"seal.cu", "seal_lattice.cu", "attend_decode_128.cu", "device.cu", *OTHERS.values()} <= names


def test_each_row_is_one_instance(tmp_path: Path) -> None:
    """Of instances.inc, which attend.cuh includes to declare the launches."""
    rows = re.findall(
        r"^KVQ_LAUNCH\((\w+), (\w+), (.+)\)$", (ROOT / "cuda/walk/instances.inc").read_text(), re.MULTILINE
    )
    assert {p.name for p in INSTANCES} == {f"attend_{name}.cu" for name, _, _ in rows} and len(rows) > 50
    for name, header, function in rows:
        text = (Path(WRITTEN.name) / f"attend_{name}.cu").read_text()
        assert (ROOT / "cuda/walk" / f"{header}.cuh").exists() and f'#include "cuda/walk/{header}.cuh"' in text
        assert f"void kvq_launch_{name}(" in text and f"    {function}(a, n_streams, stream, occupancy);" in text
    # a source of a row that is gone would be compiled and linked
    (tmp_path / "attend_gone.cu").write_text("")
    assert [p.name for p in instances(tmp_path)] == [p.name for p in INSTANCES]


def test_a_wrong_row_is_named(tmp_path: Path) -> None:
    for folder, name in (("cmake", "cuda_instances.cmake"), ("ggml-kvq/cuda/walk", "instance.cu.in")):
        (tmp_path / folder).mkdir(parents=True)
        shutil.copy(ROOT.parent / folder / name, tmp_path / folder)
    (tmp_path / "ggml-kvq/cuda/walk/instances.inc").write_text("// a comment\n\nKVQ_LAUNCH(short_64, attend_short)\n")
    done = write(tmp_path, tmp_path / "out")
    said = " ".join(done.stderr.split())
    assert done.returncode and "KVQ_LAUNCH(short_64, attend_short): a row is KVQ_LAUNCH(name, header," in said, said


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_upstreams_context_is_read_without_cublas(tmp_path: Path) -> None:
    """host/cuda/cuda_stream.cu includes upstream's header, which includes cuBLAS's: the wheel of our kernels alone is
    built where there is none (cmake/without_cublas), and must not want a function of it.
    """
    fetched = [sys.executable, str(ROOT.parent / "scripts/fetch_llama_cpp.py")]
    ggml = Path(subprocess.run(fetched, capture_output=True, text=True, check=True).stdout.strip()) / "ggml"
    include = [ROOT.parent / "cmake/without_cublas", ROOT, ROOT / "include", ggml / "include", ggml / "src"]
    flags = ["-std=c++17", "-arch=sm_80", *(f"-I{p}" for p in include), "-c", str(ROOT / "host/cuda/cuda_stream.cu")]
    done = subprocess.run([str(NVCC), *flags, "-o", str(tmp_path / "a.o")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    wanted = subprocess.run(["nm", "-u", tmp_path / "a.o"], capture_output=True, text=True, check=True).stdout
    assert "ggml_cuda_set_device" in wanted and "cublas" not in wanted


OTHERS = {  # one file each for what else the build targets; all of them with KVQ_CUDA_ARCHS="86 89 90 100 120"
    "86": "attend_short_lattice_wide.cu",
    "89": "attend_decode_mixed_128.cu",
    "90": "attend_short_64.cu",
    "100": "seal_mixed.cu",
    "120": "attend_short_wide.cu",
}
ALL = os.environ.get("KVQ_CUDA_ARCHS", "").split()


def is_twin(source: Path) -> bool:
    """Of heads of 64 channels: the same template as for 128, with half of the registers. test_cuda_on_host.py compiles
    it for the host; nvcc does so with KVQ_CUDA_ARCHS.
    """
    return source.name.endswith("_64.cu") and source.with_name(source.name[:-5] + "128.cu") in INSTANCES


CASES = [("80", source) for source in SOURCES if ALL or not is_twin(source)] + [
    (arch, source) for arch in OTHERS for source in SOURCES if arch in ALL or source.name == OTHERS[arch]
]


def architectures() -> set[str]:
    """What this nvcc compiles for."""
    run = subprocess.run([str(NVCC), "--list-gpu-arch"], capture_output=True, text=True, check=True)
    return set(re.findall(r"compute_(\d+)", run.stdout))


def resources(text: str) -> list[tuple[str, int, int, int]]:
    """Of ptxas -v: kernel, registers, bytes of static shared memory, bytes of spills."""
    found = []
    for part in text.split("Compiling entry function ")[1:]:
        used = re.search(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?", part)
        spilled = re.search(r"(\d+) bytes spill stores", part)
        assert used and spilled, part[:500]
        found.append((part.split("'")[1], int(used[1]), int(used[2] or 0), int(spilled[1])))
    return found


def flags_of(arch: str, source: Path) -> list[str]:
    """What nvcc is told, but for where the tree lies: every run of CI clones it anew."""
    exact = ["-fmad=false"] if source.parent.name == "seal" else []
    return [*exact, "-std=c++17", f"-arch=sm_{arch}", "-Xptxas", "-O1,-v", "-c"]


def name_of(file: Path) -> str:
    """From the root; of an instance its name alone."""
    return file.name if file in INSTANCES else str(file.relative_to(ROOT))


def compiled(arch: str, source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """One file for one architecture; what ptxas says of its kernels is on stderr."""
    flags = flags_of(arch, source)
    command = [str(NVCC), *flags, f"-I{ROOT}", f"-I{ROOT / 'include'}", str(source), "-o", str(out)]
    read = [part for p in reads(source) for part in (name_of(p), p.read_bytes())]
    key = object_cache.key_of("nvcc", versions(), json.dumps(flags), *read)
    said = object_cache.read(key)
    if said is not None:  # the same compiler has read the same text
        return subprocess.CompletedProcess(command, 0, "", said.decode())
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        object_cache.write(key, done.stderr.encode())
    return done


@cache
def versions() -> str:
    host = os.environ.get("NVCC_CCBIN") or shutil.which("g++") or "g++"
    return (
        object_cache.compiler_version(host)
        + subprocess.run([str(NVCC), "--version"], capture_output=True, text=True, check=True).stdout
    )


def reads(source: Path) -> list[Path]:
    """The source and every file of ours that it includes, at any depth and under any condition: what decides its object
    besides compiler and flags. nvcc cannot be asked for the text of every pass apart.
    """
    found, waiting = {source}, [source]
    while waiting:
        file = waiting.pop()
        for name in re.findall(r'^\s*#\s*include\s*["<]([^">]+)[">]', file.read_text(), re.MULTILINE):
            for folder in (file.parent, ROOT, ROOT / "include"):
                there = (folder / name).resolve()
                if there.is_file() and ROOT in there.parents and there not in found:
                    found.add(there)
                    waiting.append(there)
    return sorted(found)


def test_where_the_tree_lies_does_not_count() -> None:
    assert not [flag for source in SOURCES for flag in flags_of("80", source) if str(ROOT.parent) in flag]


def test_what_a_source_reads() -> None:
    """Found by name as the preprocessor finds it; a header of host/ is read by none."""
    read = {p.name for source in SOURCES for p in reads(source)}
    assert {"device.cu", "ggml-kvq.h", "f16.h"} <= read and "resolve.h" not in read
    host = shutil.which("g++")
    if host is None:
        pytest.skip("needs g++")
    for source in sorted((ROOT / "cpu").glob("*.cpp"))[:4]:  # of these the compiler tells itself
        said = subprocess.run(
            [host, "-MM", f"-I{ROOT}", f"-I{ROOT / 'include'}", str(source)], capture_output=True, text=True, check=True
        ).stdout
        told = {Path(word).resolve() for word in said.replace("\\\n", " ").split()[1:]}
        assert told <= set(reads(source)), source.name


@pytest.fixture(scope="module")
def builds(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, Path], Future[subprocess.CompletedProcess[str]]]]:
    """What the chosen tests compile, on all cores."""
    folder, known = tmp_path_factory.mktemp("cuda"), architectures()
    chosen: list[dict[str, Any]] = [
        x.callspec.params
        for x in request.session.items
        if isinstance(x, pytest.Function) and x.path == request.path and hasattr(x, "callspec")
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {
            (c["arch"], c["source"]): pool.submit(
                compiled, c["arch"], c["source"], folder / f"{c['source'].stem}_{c['arch']}.o"
            )
            for c in chosen
            if c["arch"] in known
        }


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
@pytest.mark.parametrize(("arch", "source"), CASES, ids=lambda x: x if isinstance(x, str) else x.name)
def test_compiles(
    arch: str, source: Path, builds: dict[tuple[str, Path], Future[subprocess.CompletedProcess[str]]]
) -> None:
    """ptxas reads the inline assembly. Registers and static shared memory fit every card of the architecture: at most
    255 registers, 48 KB a block before a kernel asks for more. What is asked for is held to each card's limit where it
    is launched (test_cuda_on_host.py).
    """
    if (arch, source) not in builds:
        pytest.skip(f"this nvcc does not know sm_{arch}")
    run = builds[arch, source].result()
    assert run.returncode == 0, run.stderr[-2000:]
    assert "warning" not in run.stderr, run.stderr[-2000:]
    kernels = resources(run.stderr)
    assert kernels or "__global__" not in source.read_text(), "ptxas names no kernel"
    for name, registers, shared, spilled in kernels:
        print(f"sm_{arch:<4} {registers:>4} registers {shared:>6} bytes static shared {spilled:>4} spilled  {name}")
        assert registers <= 255, name
        assert shared <= 48 << 10, name
        assert spilled <= 512, f"{name} spills {spilled} bytes"
