"""The C++ tests, built from this tree with the address sanitizer: random operations on the page store, the ops of
any ggml graph.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import cast

import object_cache
import pytest
from conftest import run_until_said
from ggml_kvq import _paths

ROOT = Path(__file__).resolve().parent.parent
TESTS = [
    *(
        "test_store",
        "test_window",
        "test_mrope",
        "test_graph_door",
        "test_chain",
        "test_slots",
        "test_fuzz_calibration",
        "test_fuzz_states",
        "test_layers",
        "test_caches",
        "test_far",
        "test_probe",
        "test_memory",
        "test_images",
        "test_parallel",
        "test_apart",
    ),
    "ggml-graph",
    "ggml-kvq-apart",
]
SANITIZERS = ("asan", "ubsan")  # runtimes, which a program that has none takes by LD_PRELOAD
RUNS = [
    *(("test_store", ["42", "400"]), ("test_store", ["2026", "200"]), ("test_graph_door", [])),
    *(("test_chain", ["3", "40"]), ("test_chain", ["1", "40"])),
    *(("test_mrope", ["1"]), ("test_mrope", ["2"])),
    ("test_window", ["1"]),
    ("test_fuzz_states", ["400"]),
    ("test_fuzz_calibration", ["40000"]),
    *((name, []) for name in ("test_slots", "test_layers", "test_caches", "test_far")),
    *(("test_probe", []), ("test_memory", [])),
    ("test_images", ["150", "3"]),
    ("test_parallel", []),
    ("test_apart", ["1", "120"]),
]


@pytest.fixture(scope="module")
def build_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("native")
    # generator and build type of `pip install`: the build of llama.cpp that it cached serves here too
    options = [
        "-G",
        "Ninja",
        "-DCMAKE_BUILD_TYPE=Release",
        "-DKVQ_BUILD_TESTS=ON",
        "-DKVQ_SANITIZE=address,undefined",
        "-DKVQ_WERROR=ON",
        "-DCMAKE_CXX_FLAGS_RELEASE=-O1",
        f"-DCMAKE_CXX_COMPILER_LAUNCHER={object_cache.launcher(ROOT)}",
    ]
    for argv in (
        ["cmake", "-S", str(ROOT), "-B", str(build), *options],
        ["cmake", "--build", str(build), "--target", *TESTS],
    ):
        r = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=1800)
        assert r.returncode == 0, r.stdout[-3000:] + r.stderr[-3000:]
    return build


Result = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, build_dir: Path
) -> Iterator[dict[tuple[str, tuple[str, ...]], Future[Result]]]:
    """The chosen programs, side by side on all cores."""
    # leaks are looked for in our code; libgomp keeps its team's memory
    env = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=1",
        "LSAN_OPTIONS": "suppressions=" + str(ROOT / "tests" / "native" / "lsan.supp"),
    }

    def run(name: str, args: tuple[str, ...]) -> Result:
        argv = [str(build_dir / "tests" / name), *args]
        return subprocess.run(argv, check=False, capture_output=True, text=True, timeout=900, env=env)

    chosen: list[tuple[str, tuple[str, ...]]] = [
        (str(x.callspec.params["name"]), tuple(cast("Sequence[str]", x.callspec.params["args"])))
        for x in request.session.items
        if isinstance(x, pytest.Function) and x.originalname == "test_native" and x.path == request.path
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {(name, args): pool.submit(run, name, args) for name, args in chosen}


@pytest.mark.parametrize(("name", "args"), RUNS)
def test_native(results: dict[tuple[str, tuple[str, ...]], Future[Result]], name: str, args: list[str]) -> None:
    r = results[name, tuple(args)].result()
    print(r.stdout[-2000:])
    assert r.returncode == 0, r.stdout[-2000:] + r.stderr[-3000:]
    assert "runtime error" not in r.stderr, r.stderr[-3000:]


def test_the_ops_of_any_ggml_graph_without_llama_cpp(build_dir: Path) -> None:
    """examples/ggml-graph.cpp on libggml-kvq.so."""
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    r = subprocess.run(
        [str(build_dir / "examples" / "ggml-graph")], check=False, capture_output=True, text=True, timeout=300, env=env
    )
    assert r.returncode == 0 and "runtime error" not in r.stderr, r.stdout + r.stderr[-3000:]
    assert "behind the prediction" in r.stdout


@pytest.mark.parametrize(
    "method",
    ["f16", "kivi", "kivi:place=host", "higgs", "aqua:predictor=none", "xquant", "auto", "zipcache", "minikv"]
    + ["specache", "specache:top=16,fetch=ahead,kept=64"],
)
def test_a_model_over_a_device_of_a_test(build_dir: Path, demo_model: Path, method: str) -> None:
    """The whole library over a device that is no CPU and no GPU (tests/native/apart.h): the same perplexity, four
    windows at once.
    """
    cache = (build_dir / "CMakeCache.txt").read_text()
    compiler = cache.split("CMAKE_CXX_COMPILER:")[1].split("=")[1].split("\n")[0]
    asked = [[compiler, f"-print-file-name=lib{x}.so"] for x in SANITIZERS]
    runtimes = [subprocess.run(x, check=True, capture_output=True, text=True).stdout.strip() for x in asked]
    name, _, options = method.partition(":")
    env = {**os.environ, "KVQ_METHOD": name, "KVQ_OPTS": options, "KVQ_MODEL": str(demo_model)}
    env |= {"ASAN_OPTIONS": "detect_leaks=0", "LD_PRELOAD": " ".join(runtimes), "CUDA_VISIBLE_DEVICES": ""}
    text = ["-f", str(ROOT / "tests" / "data" / "walk.txt"), "-c", "512", "--chunks", "4", "-ub", "128"]
    argv = [str(_paths.program("llama-perplexity")), "-m", str(demo_model), "-fa", "on", "-t", "1", *text]
    said = []
    for backend in ("lib/libggml-kvq.so", "tests/libggml-kvq-apart.so"):
        env["GGML_BACKEND_PATH"] = str(build_dir / backend)
        said.append(run_until_said("PPL = ", [*argv, "-dev", "KVQ0"], env=env, timeout=120))
        assert said[-1].returncode == 0 and "runtime error" not in said[-1].stderr, said[-1].stderr[-3000:]
    cpu, apart = (re.findall(r"PPL = ([\d.]+)", x.stdout + x.stderr) for x in said)
    assert cpu and cpu == apart
    assert re.search(r"apart: \d+ of memory", said[1].stderr) and "kernels apart" in said[1].stderr


#: An order of the folders of kvq-core and host/ in which each links with those before it.
ORDER = ("types", "engine", "cpu", "methods", "store", "policy", "cache", "gguf", "host")
#: What still needs a folder above it: (folder, name without parameters), declared there and defined in gguf/ or host/.
UPWARDS = {
    ("cache", name)
    for name in (
        "kvq_set_error",
        "kvq_draft_asked",
        "kvq_guess_shape",
        "kvq_config_draft",
        "kvq_config_current",
        "kvq_calibration_for",
        "kvq_model_info::n_attention",
        "kvq_model_info::latent_of",
        "kvq_model_info::number_of",
        "kvq_calibration::fits",
    )
}


def test_folders_link_downwards(build_dir: Path) -> None:
    """A folder needs no name that only a folder above it defines: what #include lines do not show (test_house.py)."""
    defined: dict[str, set[str]] = {}
    wanted: set[tuple[str, str]] = set()
    objects = sorted(build_dir.glob("CMakeFiles/kvq-*.dir/ggml-kvq/**/*.o"))
    folder_of = {o: o.relative_to(build_dir).parts[3] for o in objects}
    assert set(folder_of.values()) == set(ORDER) and len(objects) > 90
    listed = subprocess.run(["nm", "-A", "-P", *objects], check=True, capture_output=True, text=True).stdout
    for line in listed.splitlines():
        path, _, symbol = line.partition(": ")
        name, kind = symbol.split()[:2]
        if kind == "U":
            wanted.add((folder_of[Path(path)], name))
        elif kind not in "wv":
            defined.setdefault(name, set()).add(folder_of[Path(path)])
    ours = {n for n in defined if not n.startswith(("ggml_", "gguf_"))}  # host/process.cpp binds those of ggml
    up = sorted((a, n) for a, n in wanted if n in ours and min(map(ORDER.index, defined[n])) > ORDER.index(a))
    plain = subprocess.run(
        ["c++filt", "-p"], input="\n".join(n for _, n in up), check=True, capture_output=True, text=True
    ).stdout.split("\n")
    found = {(a, name) for (a, _), name in zip(up, plain, strict=False)}
    assert found <= UPWARDS, f"these point up: {sorted(found - UPWARDS)}"
    assert not UPWARDS - found, f"no longer exceptions: {sorted(UPWARDS - found)}"
