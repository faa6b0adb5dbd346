"""Files of the pinned llama.cpp that are compiled together (cmake/llama_unity.cmake) mean what they mean alone.

What a compiler refuses (one name defined twice) needs no test. It keeps silent where a name of one file changes what
another one calls: a static function that is one more overload, a macro. These are looked for in the groups as cmake
makes them.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WINDOWS = {"WIN32_LEAN_AND_MEAN", "NOMINMAX", "PATH_MAX"}  # defined on Windows only
UNDONE = {"FILENAME"}  # cmake/llama_unity.cmake undefines it behind every file


def run(*argv: str | Path) -> str:
    words = [str(a) for a in argv]
    r = subprocess.run(words, check=False, capture_output=True, text=True, timeout=600)
    assert r.returncode == 0, r.stdout[-3000:] + r.stderr[-3000:]
    return r.stdout


@pytest.fixture(scope="module")
def source() -> Path:
    return Path(run("python3", ROOT / "scripts/fetch_llama_cpp.py").strip())


def settings(build: Path, *options: str) -> str:
    run("cmake", "-S", ROOT, "-B", build, "-DKVQ_BUILD_PROGRAMS=ON", "-DCMAKE_BUILD_TYPE=Release", *options)
    return (build / "llama_settings.cmake").read_text()


@pytest.fixture(scope="module")
def groups(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Every group's files, in their order; key: target and name of the group."""
    build = tmp_path_factory.mktemp("unity")
    settings(build / "ours")
    theirs = build / "llama.cpp"
    run("cmake", "-S", source, "-B", theirs, "-C", build / "ours" / "llama_settings.cmake", "-Wno-dev")
    found = {}
    for path in sorted(theirs.rglob("unity_*.cxx")):
        target = path.parent.parent.name.removesuffix(".dir")
        found[f"{target}/{path.stem}"] = [Path(p) for p in re.findall(r'^#include "(.*)"', path.read_text(), re.M)]
    return found


def without_text(code: str) -> str:
    """C++ without comments and strings."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", code, flags=re.S)
    return re.sub(r'"(?:\\.|[^"\\\n])*"', '""', code)


def of_one_file(code: str) -> set[str]:
    """Names of static functions, of functions in unnamed namespaces and of macros."""
    names = set(re.findall(r"^\s*#\s*define\s+(\w+)", code, re.M))
    names |= set(re.findall(r"^(?:template\s*<[^>]*>\s*)?static\s[^;={}()]*?\b(\w+)\s*\(", code, re.M))
    for body in re.findall(r"^namespace\s*\{(.*?)^\}", code, re.M | re.S):
        names |= set(re.findall(r"^ {0,4}[\w:<>*&][\w:<>*&, ]*?\b(\w+)\s*\([^;{}]*\)\s*\{", body, re.M))
    return names - WINDOWS - UNDONE - {"void", "int", "bool"}  # the arguments of std::function<...> look like a name


def leaks(files: dict[str, str]) -> list[str]:
    """Names of one file that a later one of its group mentions."""
    before: dict[str, str] = {}
    found = []
    for name, text in files.items():
        code = without_text(text)
        words = set(re.findall(r"\w+", code))
        found += [f"{word} of {owner} in {name}" for word, owner in before.items() if word in words]
        before |= dict.fromkeys(of_one_file(code), name)
    return found


def test_names_that_leak_are_found() -> None:
    first = "#define SCALE 2\nstatic float clamp(float x) {\n}\nnamespace {\nint rank(int a) {\n}\n}\n"
    assert leaks({"a": first, "b": "int f() { return 1; }"}) == []
    for later in ("x = clamp(1);", "rank(2);", "#ifdef SCALE"):
        assert len(leaks({"a": first, "b": later})) == 1, later
        assert leaks({"b": later, "a": first}) == []
    assert leaks({"a": first, "b": '// clamp\nputs("rank");'}) == []


def test_no_name_leaks(groups: dict[str, list[Path]]) -> None:
    found = {group: leaks({f.name: f.read_text() for f in files}) for group, files in groups.items()}
    assert not {group: names for group, names in found.items() if names}


def test_every_slow_target_is_compiled_in_groups(groups: dict[str, list[Path]], source: Path) -> None:
    targets = {group.split("/")[0] for group in groups}
    assert targets == {"llama", "llama-common", "mtmd", "server-context", "llama-server-impl", "llama-cli-impl"}
    files = [f for group in groups.values() for f in group]
    assert len(files) == len(set(files)) and len(files) > 250
    alone = {"json.cpp", "value.cpp", "llguidance.cpp", "mtmd-helper.cpp", "mtmd-helper-gen.cpp"}
    assert not alone & {f.name for f in files}
    assert all(f.is_file() and f.is_relative_to(source) for f in files)


def test_only_the_pinned_source_and_only_if_asked(source: Path, tmp_path: Path) -> None:
    """A tree of the user's, even of the same version, is compiled file by file."""
    for options in ([f"-DLLAMA_CPP_DIR={source}"], ["-DKVQ_LLAMA_UNITY=OFF"]):
        text = settings(tmp_path / str(len(options[0])), *options)
        assert "/llama_unity.cmake" not in text and "/llama_flags.cmake" in text
