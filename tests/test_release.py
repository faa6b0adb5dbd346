"""What a release says about itself: one version everywhere, a citation with every paper, files that people expect."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from ggml_kvq import __version__, _paths
from ggml_kvq.core.loader import libraries

ROOT = Path(__file__).resolve().parent.parent


def test_the_version_stands_in_one_place() -> None:
    """pyproject.toml, CMake and the library take it from _version.py; the citation repeats it."""
    assert re.fullmatch(r"\d+\.\d+\.\d+(?:(?:a|b|rc|\.dev)\d+)?", __version__)
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project and 'input = "python/ggml_kvq/_version.py"' in project
    assert "file(READ python/ggml_kvq/_version.py version_py)" in (ROOT / "CMakeLists.txt").read_text()
    said = libraries().need_kvq().kvq_version().decode()
    assert said == __version__, "the library was built from another version"
    cited = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited == [__version__]
    text = (ROOT / "CHANGELOG.md").read_text()
    assert f"## [{__version__}]" in text or ("## [Unreleased]" in text and __version__ in text)


def test_the_citation_has_every_paper() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    for arxiv in ("2501.19392", "2405.14256", "2510.11236", "2411.18077", "2503.16163", "2402.02750", "2411.17525"):
        assert f'"arXiv:{arxiv}"' in text, arxiv


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda p: p.name)
def test_issue_forms_ask_for_the_doctor(path: Path) -> None:
    text = path.read_text()
    assert path.name == "config.yml" or ("ggml-kvq doctor" in text and text.startswith("name: "))


@pytest.mark.parametrize("name", ["SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_files_that_are_named_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    paths = re.findall(r"`((?:scripts|tests|docs|python/ggml_kvq|ggml-kvq)/[\w./-]+)`", text)
    code = [f"ggml-kvq/{x}" for x in re.findall(r"`((?:host|gguf|store|cache)/\w+\.cpp)`", text)]
    missing = [x for x in [*links, *paths, *code] if not (ROOT / x).exists()]
    assert not missing, missing


# ------------------------------------------------------------------ wheels


@pytest.fixture(scope="module")
def repair() -> ModuleType:
    spec = importlib.util.spec_from_file_location("repair_wheel", ROOT / "scripts" / "repair_wheel.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_wheel(folder: Path, rpath: str = "$ORIGIN", beside: bool = True) -> Path:
    """Two libraries, of which b needs a."""
    root = folder / "tree"
    (root / "pkg/lib").mkdir(parents=True)
    (root / "pkg-1.0.dist-info").mkdir()
    (folder / "a.c").write_text("#include <math.h>\nint a(void) { return (int) sqrt(3.0); }\n")
    (folder / "b.c").write_text("int a(void);\nint b(void) { return a(); }\n")
    lib = root / "pkg/lib"
    for argv in (
        ["a.c", "-o", str(lib / "liba.so"), "-lm"],
        ["b.c", "-o", str(lib / "libb.so"), f"-L{lib}", "-la", f"-Wl,--no-as-needed,-rpath,{rpath}"],
    ):
        subprocess.run(["cc", "-shared", "-fPIC", *argv], cwd=folder, check=True)
    if not beside:
        (lib / "liba.so").unlink()
    (root / "pkg-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: pkg\nVersion: 1.0\n\nText\n")
    (root / "pkg-1.0.dist-info/WHEEL").write_text("Wheel-Version: 1.0\nTag: py3-none-linux_x86_64\n")
    (root / "pkg-1.0.dist-info/RECORD").write_text("")
    out = folder / "pkg-1.0-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(out, "w") as z:
        for path in sorted(root.rglob("*")):
            z.write(path, str(path.relative_to(root)))
    return out


def test_a_wheel_gets_the_tag_that_its_symbols_want(
    repair: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(tmp_path)
    monkeypatch.setattr(sys, "argv", ["x", str(wheel), "-o", str(tmp_path / "out"), "--name", "pkg-cu13"])
    assert repair.main() == 0
    [made] = (tmp_path / "out").iterdir()
    assert re.fullmatch(r"pkg_cu13-1\.0-py3-none-manylinux_2_\d+_x86_64\.whl", made.name)
    with zipfile.ZipFile(made) as z:
        record = z.read("pkg_cu13-1.0.dist-info/RECORD").decode().splitlines()
        assert sorted(line.split(",")[0] for line in record) == sorted(z.namelist())
        assert "Name: pkg-cu13" in z.read("pkg_cu13-1.0.dist-info/METADATA").decode()
        assert made.name.split("py3-none-")[1][:-4] in z.read("pkg_cu13-1.0.dist-info/WHEEL").decode()
    assert repair.tag({"GLIBC": (2, 28)}, "x86_64") == "manylinux_2_28_x86_64"
    assert repair.tag({"GLIBC": (2, 28), "GLIBCXX": (3, 4, 30)}, "x86_64") == "manylinux_2_35_x86_64"
    with pytest.raises(SystemExit, match="newer than every release"):
        repair.tag({"GLIBC": (2, 99)}, "x86_64")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"beside": False}, "libb.so needs liba.so, which is not in the wheel"),
        ({"rpath": "/opt/lib"}, "libb.so needs liba.so and does not look beside itself"),
    ],
)
def test_a_wheel_that_would_not_start_is_refused(
    repair: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: dict[str, object],
    said: str,
) -> None:
    wheel = make_wheel(tmp_path, **how)  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "argv", ["x", str(wheel), "-o", str(tmp_path / "out")])
    assert repair.main() == 1
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


# ------------------------------------------------------------------ the library with CUDA kernels alone


def refused(folder: Path, backend: Path) -> str:
    """What a launcher says that finds llama.cpp in `folder` and libggml-kvq.so at `backend`."""
    code = "import sys; from ggml_kvq.launch import launcher; sys.exit(launcher.llama_completion())"
    argv = [sys.executable, "-c", code, "-m", str(ROOT / "models/kvq-demo-q8_0.gguf"), "--kv-method", "kivi"]
    env = {**os.environ, "KVQ_LIB_DIR": str(folder), "KVQ_BACKEND": str(backend)}
    r = subprocess.run(argv, capture_output=True, text=True, check=False, env=env)
    assert r.returncode != 0 and len(r.stderr.splitlines()) == 1, r.stderr
    return r.stderr


def test_the_cuda_library_says_what_it_needs_and_finds_it(tmp_path: Path) -> None:
    """It lies in a folder of its own and names no library of ggml; the CUDA runtime is named where it is missing."""
    folder, addon = tmp_path / "llama", tmp_path / "addon"
    folder.mkdir()
    addon.mkdir()
    (folder / "llama-completion").touch(mode=0o755)
    (tmp_path / "empty.c").write_text("int kvq_empty;\n")
    for name in ("llama/libggml-base.so.0", "addon/libcudart.so.99"):
        argv = ["cc", "-shared", "-fPIC", "empty.c", f"-Wl,-soname,{Path(name).name}", "-o", name]
        subprocess.run(argv, cwd=tmp_path, check=True)
    backend = addon / "libggml-kvq.so"
    needs = ["-Wl,--no-as-needed", "addon/libcudart.so.99", "-Wl,-rpath,$ORIGIN"]
    subprocess.run(["cc", "-shared", "-fPIC", "empty.c", *needs, "-o", str(backend)], cwd=tmp_path, check=True)
    assert "is of another ggml-kvq version" in refused(folder, backend)  # it was opened, with the runtime
    (addon / "libcudart.so.99").unlink()
    said = refused(folder, backend)
    assert "libcudart.so.99" in said and "nvidia-cuda-runtime" in said


def test_the_library_names_no_library_of_ggml() -> None:
    """One file for every llama.cpp: it finds ggml in the process that loads it (host/process.cpp)."""
    said = subprocess.run(["readelf", "-dW", _paths.backend()], capture_output=True, text=True, check=True).stdout
    assert "libstdc++" in said and "ggml" not in said.replace("libggml-kvq.so", ""), said
    names = subprocess.run(["nm", "-D", _paths.backend()], capture_output=True, text=True, check=True).stdout
    assert "T ggml_backend_init" in names
    others = {n for n in re.findall(r"\b(?:ggml|gguf)_\w+", names) if not n.startswith("ggml_kvq_")}
    assert others == {"ggml_backend_init", "ggml_backend_score"}, others


def test_the_add_on_wheel_tells_where_its_library_lies(tmp_path: Path) -> None:
    library = tmp_path / "libggml-kvq.so"
    library.write_bytes(b"\x7fELF")
    argv = [sys.executable, str(ROOT / "scripts/addon_wheel.py"), str(library), "1.2.3", str(tmp_path / "out")]
    made = Path(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip())
    with zipfile.ZipFile(made) as z:
        assert "Requires-Dist: ggml-kvq==1.2.3" in z.read("ggml_kvq_cu13-1.2.3.dist-info/METADATA").decode()
        z.extractall(tmp_path / "there")
    argv = [sys.executable, "-m", "ggml_kvq_cu13"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "there")}
    said = subprocess.run(argv, capture_output=True, text=True, check=True, env=env).stdout.strip()
    assert Path(said).read_bytes() == b"\x7fELF"
