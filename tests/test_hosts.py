"""Programs that people have, with their own prebuilt llama.cpp: node-llama-cpp, xllamacpp, llama-cpp-python, cyllama.
One libggml-kvq.so serves them all, or refuses in one line. They come from npm and PyPI into the cache; a test whose
program cannot be had there is skipped.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from ggml_kvq import _paths

HOSTS = ROOT / "tests" / "hosts"
LOAD_LINE = re.compile(r"ggml-kvq: (\w+).* MiB KV cache instead of ", re.M)


def cache() -> Path:
    spec = importlib.util.spec_from_file_location("fetch", ROOT / "scripts" / "fetch_llama_cpp.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = Path(module.default_cache()) / "hosts"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def fetched(name: str, *command: str) -> Path:
    """A folder of the cache that `command` has filled; the test is skipped where it fails."""
    final = cache() / name
    with open(cache() / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not final.is_dir():
            part = cache() / f"{name}.part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            try:
                done = subprocess.run(command, cwd=part, capture_output=True, text=True, check=False, timeout=600)
                said = (done.stderr.strip().splitlines() or ["no word"])[-1]
            except (OSError, subprocess.TimeoutExpired) as e:
                done, said = None, str(e)
            if done is None or done.returncode:
                pytest.skip(f"{name} cannot be had here: {said}")
            part.rename(final)
    return final


def wheel(requirement: str) -> Path:
    argv = (sys.executable, "-m", "pip", "install", "--no-deps", "--only-binary", ":all:", "--target", ".", requirement)
    return fetched(requirement.replace("==", "-"), *argv)


def run(argv: list[str | Path], cwd: Path | None = None, **env: Any) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KVQ_", "LLAMA_ARG_"))}
    return subprocess.run(argv, cwd=cwd, env={**clean, **env}, capture_output=True, text=True, check=False, timeout=300)


def in_python(site: Path, script: str, *argv: str | Path) -> subprocess.CompletedProcess[str]:
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return run(
        [sys.executable, HOSTS / script, *argv],
        PYTHONPATH=os.pathsep.join(paths),
        KVQ_BACKEND=str(_paths.backend()),
        KVQ_LIB_DIR=str(_paths.lib_dir()),
    )


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


# ------------------------------------------------------------------ node-llama-cpp


@pytest.mark.parametrize("version", ["3.21.1", "latest"])
def test_node_llama_cpp_keeps_its_cache_in_ours(version: str, demo_model: Path, tmp_path: Path) -> None:
    """Its libggml-base has a SONAME of its own, and so had no version check to fail; ggml 0.23 and newer."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    npm = ("npm", "install", "--ignore-scripts", "--no-fund", "--no-audit", "--prefix", ".")
    folder = fetched(f"node-llama-cpp-{version}", *npm, f"node-llama-cpp@{version}")
    prompt = (ROOT / "tests" / "data" / "walk.txt").read_text()[:1200]
    argv: list[str | Path] = ["node", HOSTS / "node.mjs", demo_model, prompt, tmp_path / "state"]
    texts = {"own": answer(run(argv, folder))}
    for method, opts in (("f16", ""), ("kivi", "bits=4")):
        done = run(argv, folder, GGML_BACKEND_PATH=str(_paths.backend()), KVQ_METHOD=method, KVQ_OPTS=opts)
        texts[method] = answer(done)
        assert LOAD_LINE.findall(done.stderr) == [method], done.stderr
        assert "model file unknown" not in done.stderr, done.stderr
    assert texts["f16"]["text"] == texts["own"]["text"] != ""
    for got in texts.values():
        assert got["again"] == got["halves"] != "", texts
    with_kivi: list[str | Path] = [
        _paths.lib_dir() / "llama-completion",
        "-m",
        demo_model,
        "-p",
        prompt,
        "-n",
        "24",
        "-no-cnv",
    ]
    said = run(
        [*with_kivi, "--temp", "0", "-fa", "on", "-dev", "KVQ0", "-c", "1024", "-t", "2", "--no-display-prompt"],
        GGML_BACKEND_PATH=str(_paths.backend()),
        KVQ_METHOD="kivi",
        KVQ_OPTS="bits=4",
    )
    launched = said.stdout.strip()  # a token fewer
    assert len(launched) > 40 and texts["kivi"]["text"].strip().startswith(launched), (launched, texts)


def test_the_library_is_found_beside_the_libraries_of_a_program(demo_model: Path, tmp_path: Path) -> None:
    """`ggml-kvq plugin --install`, without GGML_BACKEND_PATH; and it is undone."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    npm = ("npm", "install", "--ignore-scripts", "--no-fund", "--no-audit", "--prefix", ".")
    shared = fetched("node-llama-cpp-3.21.1", *npm, "node-llama-cpp@3.21.1")
    bins = "node_modules/@node-llama-cpp/linux-x64/bins/linux-x64"
    folder = tmp_path / "bins"
    shutil.copytree(shared / bins, folder)

    def plugin(*argv: str | Path) -> subprocess.CompletedProcess[str]:
        command: list[str | Path] = [sys.executable, "-m", "ggml_kvq.cli", "plugin", *argv]
        more: dict[str, Any] = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "KVQ_LIB_DIR": str(_paths.lib_dir())}
        return run(command, **more, KVQ_BACKEND=str(_paths.backend()))

    done = plugin("--install", folder)
    assert done.returncode == 0 and "ggml 0.23.0, devices KVQ0" in done.stdout, done.stderr
    assert (folder / "libggml-musa-kvq.so").is_file()
    done = plugin("--remove", folder)
    assert done.returncode == 0 and not list(folder.glob("*kvq*")), done.stderr
    done = plugin("--remove", folder)
    assert done.returncode == 2 and "nothing was installed there" in done.stderr
    done = plugin("--install", tmp_path)
    assert done.returncode == 2 and "holds no libggml-base.so" in done.stderr
    done = plugin("--install", _paths.lib_dir())
    if sorted(_paths.lib_dir().glob("libggml-cpu.so.*")):  # a build without modules
        assert done.returncode == 2 and "has its backends linked in" in done.stderr
    done = plugin()
    assert done.stdout == f"export GGML_BACKEND_PATH={_paths.backend()}\nexport KVQ_METHOD=kivi\n"


# ------------------------------------------------------------------ bindings for Python


def test_xllamacpp_is_one_module_with_ggml_inside(demo_model: Path) -> None:
    """ggml 0.26, whose buffer types have two members more."""
    site = wheel("xllamacpp==2026.10.11549")
    done = in_python(site, "xllamacpp_server.py", demo_model, "none", "f16", "kivi:4", "auto")
    texts = answer(done)
    assert [name for name in LOAD_LINE.findall(done.stderr)] == ["f16", "kivi", "auto"], done.stderr
    assert texts["f16"] == texts["none"] != "" and texts["auto"], texts


@pytest.fixture
def llama_cpp_python(tmp_path: Path) -> Path:
    """Folder with llama_cpp as pip installs it. Its own build takes minutes: its Python is that of the sdist, its
    libraries are those of this installation, which were built from the llama.cpp in the same sdist.
    """
    parts = ("numpy", "typing-extensions", "diskcache", "jinja2", "markupsafe")
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--only-binary", ":all:", "--target", ".")
    needs = fetched("needs-of-llama-cpp-python", *pip, *parts)
    get = "import sys; sys.path.insert(0, sys.argv[1]); import fetch_llama_cpp as f, pathlib, tarfile;"
    get += "t = tarfile.open(f.fetch_archive(pathlib.Path('.').absolute())); top = f.ARCHIVE.removesuffix('.tar.gz');"
    get += "t.extractall('.', [m for m in t if m.name.startswith(top + '/llama_cpp/')], filter='data');"
    get += "pathlib.Path(top, 'llama_cpp').rename('llama_cpp'); pathlib.Path(f.ARCHIVE).unlink()"
    source = fetched("llama-cpp-python-0.3.36", sys.executable, "-c", get, str(ROOT / "scripts"))
    site = tmp_path / "site"
    shutil.copytree(source / "llama_cpp", site / "llama_cpp")
    for file in _paths.lib_dir().glob("lib*.so*"):
        stem = file.name.partition(".so")[0]
        for name in {file.name, f"{stem}.so"} if stem != "libggml-kvq" else ():
            (site / "llama_cpp" / "lib").mkdir(exist_ok=True)
            (site / "llama_cpp" / "lib" / name).symlink_to(file.resolve())
    for part in needs.iterdir():
        (site / part.name).symlink_to(part)
    return site


def test_llama_cpp_python_with_two_methods_in_one_process(demo_model: Path, llama_cpp_python: Path) -> None:
    done = in_python(llama_cpp_python, "attached_llama.py", demo_model)
    texts = answer(done)
    assert LOAD_LINE.findall(done.stderr) == ["kivi", "f16"], done.stderr
    assert "model file unknown" not in done.stderr, done.stderr
    assert texts["f16"] == texts["own"] != "" and texts["again"] == texts["halves"] != "" and texts["chat"], texts


def test_the_example_of_llama_cpp_python_answers(demo_model: Path, llama_cpp_python: Path) -> None:
    example = ROOT / "examples" / "llama_cpp_python.py"
    assert len([line for line in example.read_text().splitlines() if line]) <= 10
    done = in_python(llama_cpp_python, str(example), demo_model)
    assert done.returncode == 0 and done.stdout.strip() and LOAD_LINE.findall(done.stderr) == ["kivi"], done.stderr


def test_a_module_that_hides_its_ggml_is_refused_in_one_line() -> None:
    """cyllama shows nothing that could load a backend; by GGML_BACKEND_PATH it loads one, and shows no function."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip("this wheel of cyllama is fetched for Python 3.11")
    site = wheel("cyllama==0.2.18")
    code = "import ggml_kvq, cyllama.llama.llama_cpp as m\ntry: ggml_kvq.attach(m)\nexcept ImportError as e: print(e)"
    env: dict[str, Any] = {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    done = run([sys.executable, "-c", code], **env, KVQ_BACKEND=str(_paths.backend()))
    assert "shows no ggml_backend_load: its ggml is linked into it and hidden" in done.stdout, done.stderr
    code = "import cyllama.llama.llama_cpp as m; m.ggml_backend_load_all()"
    done = run([sys.executable, "-c", code], **env, GGML_BACKEND_PATH=str(_paths.backend()))
    ours = [line for line in done.stderr.splitlines() if line.startswith("ggml-kvq: ")]
    assert done.returncode == 0 and len(ours) == 1, done.stderr
    assert re.search(r"error: \S*llama_cpp\S*\.so holds ggml and shows none of its functions", ours[0])
