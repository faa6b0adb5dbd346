"""The CUDA kernels run here too, on the host (tests/cuda_on_host): sealing, stores and attention against the C
reference, without a GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import object_cache
import pytest
from cuda_sources import instances

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "tests" / "cuda_on_host"
sys.path.insert(0, str(HERE))
from test_adding_a_method import files_of_the_document  # noqa: E402
from translate import INSTRUCTIONS, translate, translate_text  # noqa: E402

CXX = os.environ.get("CXX") or shutil.which("g++")
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
ISA: dict[str, tuple[str | None, list[str]]] = {  # machine and flags of the CPU kernels that are not portable
    "kernels_avx2": ("x86_64", AVX2),
    "kernels_avx512": ("x86_64", [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"]),
    "kernels_neon": ("aarch64", []),
}
# fmaf as one instruction: a sixth of all time went into libm's. Nothing is contracted that is two operations.
FUSED = [*AVX2, "-ffp-contract=off"] if " fma " in Path("/proc/cpuinfo").read_text() else []
SOURCES = ROOT / "ggml-kvq"
FOLDERS = ("base", "cpu", "engine", "methods", "plan", "policy", "store", "types")  # that need no ggml
FLAGS = ["-std=c++17", "-w", "-fopenmp", f"-I{SOURCES}", f"-I{SOURCES / 'include'}"]


def test_translation() -> None:
    """Launches, shared memory and instructions; an instruction without host code is an error that names it."""
    text = translate_text(
        "extern __shared__ __align__(16) uint8_t memory[];\nf<A<2>, 3><<<dim3(a, b), 32, nb, s>>>(x, g(y));\nasm"
        ' volatile("cp.async.wait_all;" ::: "memory"); z();'
    )
    assert "uint8_t * const memory = (uint8_t *) host_cuda::shared;" in text
    assert "host_cuda::launch(dim3(a, b), dim3( 32),  nb, [&] { f<A<2>, 3>(x, g(y)); });" in text
    assert text.rstrip().endswith("z();")
    assert "asm" not in text
    assert all(name.strip() for name, _ in INSTRUCTIONS)
    shared = translate_text("    __shared__ float a[N ? 2 : 1][3], b; // of two\n")
    assert shared == "    __shared__ float a[N ? 2 : 1][3], b; HOST_FRESH(a); HOST_FRESH(b); // of two\n"
    over_lines = translate_text("    f<A, 3>\n        <<<g, 32, 0, s>>>(x);")
    assert over_lines.strip() == "host_cuda::launch(g, dim3( 32),  0, [&] { f<A, 3>(x); });"
    with pytest.raises(SystemExit, match="wgmma"):
        translate_text('asm volatile("wgmma.fence;");')


@pytest.mark.skipif(CXX is None or os.uname().machine not in ("x86_64", "aarch64"), reason="needs g++")
def test_kernels_on_the_host(tmp_path: Path) -> None:
    """A small part of tests/native/test_cuda*.cpp; the whole of it runs on a device (scripts/gpu_check.sh)."""
    source = tmp_path / "ggml-kvq"
    (tmp_path / "instances").mkdir()
    instances(tmp_path / "instances")
    kernels = translate(ROOT / "ggml-kvq" / "cuda", source / "cuda") + translate(tmp_path / "instances", source)
    near = [f"-I{source}", f"-I{HERE / 'include'}"]
    jobs = [(f, ["-O1", *near, "-ffp-contract=off", *FUSED]) for f in kernels]
    jobs = [(f, flags) for f, flags in jobs if f.stem != "graph"]
    for folder in FOLDERS:
        for f in sorted((ROOT / "ggml-kvq" / folder).glob("*.cpp")):
            isa = ISA.get(f.stem, (None, []))
            if f.stem not in ISA or isa[0] == os.uname().machine:
                jobs.append((f, ["-O1", "-ffp-contract=off", *(isa[1] or FUSED)]))
    jobs.append((HERE / "cuda_on_host.cpp", ["-O3", *FUSED]))
    # docs/adding-a-method.md: its method and policy, and the two files that read the tables they have rows in
    added, replaced = [], []
    for name, text in files_of_the_document().items():
        path = tmp_path / "document" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".inc":
            path.write_text((ROOT / name).read_text() + text)
        elif path.suffix == ".cpp":
            path.write_text(text)
            added.append(path)
    for name in ("methods/registry.cpp", "policy/compose.cpp"):
        path = tmp_path / "document" / "ggml-kvq" / name
        path.write_text((SOURCES / name).read_text())
        added.append(path)
        replaced.append(next(i for i, (f, _) in enumerate(jobs) if f == SOURCES / name))
    document = tmp_path / "document" / "ggml-kvq"
    beside = [f"-I{document}", f"-I{SOURCES / 'methods'}", f"-I{SOURCES / 'policy'}", f"-I{ROOT / 'tests'}"]
    own = [(f, ["-O1", *beside]) for f in [*added, HERE / "document_policy.cpp"]]
    mains = [(f, ["-O1"]) for f in sorted((ROOT / "tests" / "native").glob("test_cuda*.cpp"))]
    jobs += [*own, *mains]

    def compiled(job: tuple[Path, list[str]]) -> str:
        path, flags = job
        top = next(p for p in (document, source, ROOT, tmp_path) if p in path.parents)
        out = tmp_path / "_".join([top.name * (top == document), *path.relative_to(top).with_suffix(".o").parts])
        keeper = [sys.executable, object_cache.__file__, f"--root={ROOT}"]
        # its tables, and translated headers, in front of ours
        first = [flag for flag in flags if flag in (f"-I{document}", f"-I{source}")]
        command = [*keeper, str(CXX), *first, *FLAGS, *flags, "-c", str(path), "-o", str(out)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return str(out)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, jobs))
    shared, programs = objects[: -len(mains) - len(own)], []
    rest = [o for i, o in enumerate(shared) if i not in replaced]
    program = tmp_path / "document_policy"
    subprocess.run([str(CXX), "-fopenmp", *objects[len(shared) : -len(mains)], *rest, "-o", program], check=True)
    result = subprocess.run([program], capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0 and "blocks: ok" in result.stdout, result.stdout + result.stderr
    for (source_file, _), main in zip(mains, objects[-len(mains) :], strict=True):
        programs.append(tmp_path / source_file.stem)
        subprocess.run([str(CXX), "-fopenmp", main, *shared, "-o", str(programs[-1])], check=True)

    def run(program: Path, what: str, capability: str, products: str = "") -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "OMP_NUM_THREADS": "1", **({"KVQ_CUDA_AS": capability} if capability else {})}
        env.update({"KVQ_CUDA_BYTES": products} if products else {})
        command = [str(program), *what.split()]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=2400, env=env)

    # Then as cards with 99 KB of shared memory a block: the host refuses launches that ask for more. The kernels that
    # attend choose by it; sealing, stores and far rows do not.
    kernels_of = tmp_path / "test_cuda"
    near_limit = [f"attention {part} host" for part in ("wide", "listed", "bytes", "open", "fine", "rest")]
    limits = {"8.0": 163, "8.6": 99, "9.0": 227}  # KB
    cases = [(program, "host", "", "") for program in programs]
    cases += [(tmp_path / "test_cuda_policies", "host", "8.6", "")]
    cases += [(kernels_of, what, "8.6", "") for what in ("split quick", *near_limit)]
    cases += [(kernels_of, "limits", capability, products) for capability in limits for products in "01"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = list(pool.map(lambda case: run(*case), cases))
    for (_, what, capability, _), result in zip(cases, done, strict=True):
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
        if what == "host":
            assert "attention: " in result.stdout
        if what != "limits":
            continue
        print(result.stdout)
        sizes = [int(line.split()[-1]) for line in result.stdout.splitlines() if line.split()[-1].isdigit()]
        assert len(sizes) > 100
        assert max(sizes) <= limits[capability] << 10
