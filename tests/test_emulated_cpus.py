"""The build for every CPU (GGML_NATIVE=OFF) on an old and a newer x86-64, under qemu's emulation of one program.

Built here is only what such a build has of its own: libggml without a CPU backend, and the variants for the emulated
CPUs, with the flags of the real thing. Programs, libllama and libggml-kvq.so are the installed ones; both builds
compile them alike. qemu 7.2 emulates no AVX-512: asked for Skylake-Server it offers AVX2, and says so.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from ggml_kvq import _paths

ROOT = Path(__file__).resolve().parent.parent
QEMU = shutil.which("qemu-x86_64")
VARIANTS = ["sse42", "haswell"]
#: emulated CPU -> variants of VARIANTS that it can run, the kernels of libggml-kvq.so
CPUS = {
    "Nehalem": (["sse42"], "portable"),
    "Haswell": (["haswell", "sse42"], "avx2"),
    "Skylake-Server": (["haswell", "sse42"], "avx2"),
}

if not QEMU and os.environ.get("NEED_QEMU"):
    raise RuntimeError("NEED_QEMU is set and there is no qemu-x86_64; install Debian's qemu-user")
pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="emulates x86-64 from libraries of this machine"),
    pytest.mark.skipif(not QEMU, reason="no qemu-x86_64 here (Debian: qemu-user)"),
]


def run(*argv: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    words = [str(a) for a in argv]
    return subprocess.run(words, check=False, capture_output=True, text=True, timeout=900, env={**os.environ, **env})


def must(*argv: str | Path) -> str:
    r = run(*argv)
    assert r.returncode == 0, r.stdout[-3000:] + r.stderr[-3000:]
    return r.stdout


def emulate(cpu: str, *argv: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    assert QEMU
    r = run(QEMU, "-cpu", cpu, *argv, OMP_NUM_THREADS="2", **env)
    its_own = r"^qemu-x86_64: warning: TCG doesn't support requested feature: .*\n|^qemu: uncaught target signal .*\n"
    r.stderr = re.sub(its_own, "", r.stderr, flags=re.M)
    return r


@pytest.fixture(scope="module")
def source() -> Path:
    return Path(must("python3", ROOT / "scripts/fetch_llama_cpp.py").strip())


@pytest.fixture(scope="module")
def travelling(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like ggml_kvq/lib of a wheel that travels, with two variants of the CPU backend instead of all."""
    tmp = tmp_path_factory.mktemp("travelling")
    options = ["-DKVQ_BUILD_PROGRAMS=ON", "-DGGML_NATIVE=OFF", "-DCMAKE_BUILD_TYPE=Release"]
    said = must("cmake", "-S", ROOT, "-B", tmp / "b", "-G", "Ninja", *options)
    found = re.search(r"llama\.cpp build folder: (.*)", said)
    assert found and "compiled for every CPU of this family" in said
    build = Path(found[1])  # in the cache, and that of the wheel
    must("cmake", "-S", source, "-B", build, "-G", "Ninja", "-C", tmp / "b" / "llama_settings.cmake", "-Wno-dev")
    must("cmake", "--build", build, "--target", *(f"ggml-cpu-{v}" for v in VARIANTS))
    lib = tmp / "lib"
    shutil.copytree(_paths.lib_dir(), lib, ignore=shutil.ignore_patterns("libggml-cpu*", "libggml.so*"))
    for v in VARIANTS:
        shutil.copy(build / "bin" / f"libggml-cpu-{v}.so", lib)
    base = _paths.shared_library(_paths.lib_dir(), "ggml-base")
    name = base.name.replace("ggml-base", "ggml")
    ggml = source / "ggml"
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", "-DGGML_BACKEND_DL", "-DGGML_BUILD", "-DGGML_SHARED", "-DNDEBUG"]
    files = [ggml / "src/ggml-backend-reg.cpp", ggml / "src/ggml-backend-dl.cpp"]
    link: list[str | Path] = [base, "-ldl", f"-Wl,-soname,{name},-rpath,$ORIGIN", "-o", lib / name]
    must("c++", *flags, f"-I{ggml}/include", f"-I{ggml}/src", *files, *link)
    return lib


@pytest.fixture(scope="module")
def self_check(source: Path, travelling: Path) -> Path:
    program = travelling.parent / "self-check"
    base = _paths.shared_library(travelling, "ggml-base")
    flags = ["-std=c++17", "-O2", f"-I{source}/ggml/include", f"-Wl,-rpath,{travelling}"]
    must("c++", *flags, ROOT / "cmake/self_check.cpp", base, "-ldl", "-o", program)
    return program


@pytest.mark.parametrize("cpu", CPUS)
def test_the_variants_of_a_cpu_multiply_right_on_it(self_check: Path, travelling: Path, cpu: str) -> None:
    r = emulate(cpu, self_check, travelling, "this compiler")
    assert r.returncode == 0 and r.stderr == "", r.stderr
    can, _, cannot = r.stdout.rstrip("\n").partition("; not for this CPU:")
    able, _ = CPUS[cpu]
    assert re.findall(r"libggml-cpu-(\w+)\.so", can) == able
    assert re.findall(r"libggml-cpu-(\w+)\.so", cannot) == sorted(set(VARIANTS) - set(able))


def test_an_instruction_that_the_cpu_lacks_is_told(self_check: Path, travelling: Path, tmp_path: Path) -> None:
    """The variant for Haswell without the function that asks the CPU: like a build with -march=native elsewhere."""
    library = (travelling / "libggml-cpu-haswell.so").read_bytes().replace(b"ggml_backend_score", b"ggml_backend_scorX")
    (tmp_path / "libggml-cpu.so.0").write_bytes(library)
    r = emulate("Nehalem", self_check, tmp_path, "GNU 1.2.3")
    assert r.returncode == 1 and r.stderr.count("\n") == 1
    assert "libggml-cpu.so.0, built by GNU 1.2.3, dies (Illegal instruction) " in r.stderr, r.stderr


@pytest.mark.parametrize("cpu", ["Nehalem", "Haswell"])
def test_whole_programs_run(travelling: Path, demo_model: Path, cpu: str) -> None:
    """llama-completion and every library that it loads, with our cache: no instruction that the CPU lacks."""
    prompt = ["-p", "The file", "-n", "8", "--temp", "0", "-no-cnv", "-t", "2"]
    argv: list[str | Path] = ["-m", demo_model, "-dev", "KVQ0", "-fa", "on", "-c", "512", *prompt]
    env = {"GGML_BACKEND_PATH": str(travelling / "libggml-kvq.so"), "KVQ_METHOD": "kivi", "KVQ_MODEL": str(demo_model)}
    r = emulate(cpu, travelling / "llama-completion", *argv, **env)
    assert r.returncode == 0, r.stderr[-3000:]
    assert f"kernels {CPUS[cpu][1]}" in r.stderr + r.stdout
    assert r.stdout.strip().startswith("The file") and len(r.stdout.strip()) > len("The file") + 8
