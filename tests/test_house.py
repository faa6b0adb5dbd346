"""The house: which folder of ggml-kvq/ may include which, the picture of it, and a README.md in every room."""

from __future__ import annotations

import ast
import importlib.util
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "ggml-kvq"

_STORE = {"store", "engine", "types", "base", "include"}
#: What a folder may include, itself not named. gguf/ and host/ alone also include ggml.
ALLOWED = {
    "include": set(),
    "base": set(),
    "types": {"base", "include"},
    "plan": {"types", "base", "include"},
    "engine": {"plan", "types", "base", "include"},
    "cpu": {"engine", "types", "base", "include"},
    "cuda": {"engine", "types", "base", "include"},
    "methods": {"plan", "types", "base", "include"},
    "store": {"engine", "plan", "types", "base", "include"},
    "policy": {"plan", *_STORE},
    "cache": {"policy", "methods", "plan", *_STORE},
    "gguf": {"cache", "policy", "methods", "plan", *_STORE, "llama.cpp"},
    "host": {"gguf", "cache", "policy", "methods", "plan", "cpu", "cuda", *_STORE, "llama.cpp"},
}
#: Of cuda/, room by room; "": what lies in cuda/ itself, which every room may include.
ROOMS: dict[str, set[str]] = {
    "": set(),
    "walk": set(),
    "policy": {"walk"},
    "seal": {"policy"},
    "prompt": {"walk", "policy", "seal"},
    "far": {"walk"},
    "device": {"walk", "policy", "seal", "prompt", "far"},
    "choose": {"walk", "policy", "seal", "prompt", "far", "device"},
}
#: Files of a folder at most, README.md among them, and the folders that still have more.
FILES, CROWDED = 40, {"cpu"}
#: (file, folder it includes): why the order does not hold there.
EXCEPTIONS = {
    ("include/ggml-kvq-graph.h", "llama.cpp"): "a header for programs that use ggml; its functions take ggml tensors",
}
#: Files of host/ that name an engine. Others ask engine/host.h, or an object that these made.
NAME_AN_ENGINE = {
    "host/cuda/cuda_device.cpp",  # makes CUDA devices
    "host/cuda/cuda_step.cpp",  # records steps of kvq_cuda_device
    "host/cuda/cuda_inputs.cpp",  # holds what a step is given until it begins
}
#: Imports of ggml_kvq that close a circle on purpose, inside a function: why.
PYTHON_EXCEPTIONS = {
    ("default_means", "calibrate.means"): "a model that goes better with means is opened once without, to measure them",
    ("default_means", "calibrate.halves"): "and with both kinds of keys, to see which lose less",
    ("default_means", "calibrate.capture"): "its rows are read, where predictors are fitted",
    ("default_means", "calibrate.files"): "and they are written as a sidecar",
    ("lab.method", "lab.sample"): "a laboratory method with fit() opens the model once before",
}
#: Prose that names files of ggml-kvq/.
PROSE = ("README.md", "docs", "ggml-kvq", "tests", "scripts", "python", "examples", "convert", "cmake")


@pytest.fixture(scope="module")
def picture() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_architecture", ROOT / "scripts" / "draw_architecture.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_folders_include_downwards(picture: ModuleType) -> None:
    assert set(picture.folders()) == set(ALLOWED), "a folder of ggml-kvq/ that this test does not know"
    found = [(str(p.relative_to(SOURCES)), line, a, b) for p, line, a, b in picture.includes()]
    assert len(found) > 50, "the script no longer finds the includes"
    wrong = [f"{p}:{line} includes {b}/" for p, line, a, b in found if b not in ALLOWED[a] and (p, b) not in EXCEPTIONS]
    assert not wrong, "\n".join(wrong)
    stale = [e for e in EXCEPTIONS if e not in {(p, b) for p, _, _, b in found}]
    assert not stale, f"no longer exceptions: {stale}"


def test_the_order_has_no_circle() -> None:
    level: dict[str, int] = {}
    for _ in ALLOWED:
        for name, below in ALLOWED.items():
            if all(b in level for b in below - {"llama.cpp"}):
                level.setdefault(name, 1 + max((level[b] for b in below - {"llama.cpp"}), default=0))
    assert set(level) == set(ALLOWED)
    for chain in (
        ("base", "types", "plan", "engine", "cpu", "host"),
        ("engine", "store", "policy", "cache", "gguf", "host"),
    ):
        assert [level[n] for n in chain] == sorted(level[n] for n in chain)


def test_rooms_of_cuda_include_downwards(picture: ModuleType) -> None:
    cuda, found = SOURCES / "cuda", []
    for path in sorted(p for p in cuda.rglob("*") if p.suffix in picture.SUFFIXES):
        room = path.parent.name if path.parent != cuda else ""
        for m in picture.INCLUDE.finditer(path.read_text()):
            there = next((base / m[2] for base in (path.parent, SOURCES) if (base / m[2]).is_file()), ROOT)
            if cuda in there.parents and there.parent != path.parent:
                found.append((str(path.relative_to(cuda)), room, there.parent.name if there.parent != cuda else ""))
    assert {room for _, room, _ in found} | {""} == set(ROOMS)
    wrong = [f"{path} includes {to}/" for path, room, to in found if to not in ROOMS[room] | ({""} if room else set())]
    assert not wrong, "\n".join(wrong)
    assert not circle(ROOMS), "the rooms' order has a circle"


def test_no_folder_is_crowded() -> None:
    count = {
        str(p.relative_to(SOURCES)): sum(f.is_file() for f in p.iterdir()) for p in SOURCES.rglob("*") if p.is_dir()
    }
    assert len(count) > 12 and {folder for folder, n in count.items() if n > FILES} == CROWDED, count


def test_only_the_listed_files_name_an_engine(picture: ModuleType) -> None:
    found = {str(p.relative_to(SOURCES)) for p, _, a, b in picture.includes() if a == "host" and b in ("cpu", "cuda")}
    assert found == NAME_AN_ENGINE


def test_one_file_reads_parameters_of_operations() -> None:
    """host/op_params.h: what it reads is proved when ggml loads us, and a word that is read elsewhere would not be."""
    found = {
        str(p.relative_to(SOURCES)) for p in SOURCES.rglob("*.[ch]*") if re.search(r"->op_params\b", p.read_text())
    }
    assert found == {"host/op_params.h"}


def test_an_include_that_goes_up_is_seen(picture: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quoted, bracketed, indented and beside comments; not in a comment."""
    for name in ("store", "host", "include"):
        (tmp_path / name).mkdir()
    (tmp_path / "host" / "backend.h").write_text("#pragma once\n")
    (tmp_path / "include" / "ggml-kvq.h").write_text("")
    (tmp_path / "store" / "lane.h").write_text(
        '#include "host/backend.h" // why\n  #  include <ggml-impl.h>\n// #include "gguf.h"\n#include "page.h"\n'
        "#include <vector>\n#include <ggml-kvq.h>\n"
    )
    (tmp_path / "store" / "page.h").write_text("")
    monkeypatch.setattr(picture, "SOURCES", tmp_path)
    seen = [(p.name, line, a, b) for p, line, a, b in picture.includes()]
    assert seen == [
        ("lane.h", 1, "store", "host"),
        ("lane.h", 2, "store", "llama.cpp"),
        ("lane.h", 6, "store", "include"),
    ]


def test_the_picture_is_what_the_code_gives(picture: ModuleType) -> None:
    assert picture.PICTURE.read_text() == picture.draw(), "run: python scripts/draw_architecture.py"


@pytest.mark.parametrize(
    "folder", [".", *sorted(ALLOWED), "host/cuda", *(f"cuda/{room}" for room in sorted(ROOMS) if room)]
)
def test_every_room_says_what_lives_there(folder: str) -> None:
    text = (SOURCES / folder / "README.md").read_text()
    lines = text.splitlines()
    assert 8 <= len(lines) <= 20, f"{len(lines)} lines: ten or so are enough"
    if folder == ".":
        assert all(f"{name}/" in text for name in ALLOWED)
        return
    assert folder != "cuda" or all(f"{room}/" in text for room in ROOMS if room)
    assert lines[0].startswith(f"# {folder}/: ") and "Test alone: " in text
    # files that it names exist, in the room or from the root
    names = set(re.findall(r"(?<![\w*./-])[\w./-]+\.(?:h|cpp|cu|py|sh|inc|md)\b", text)) - {"ggml.h", "llama.cpp"}
    for name in names:
        assert any((base / name).exists() for base in (SOURCES / folder, SOURCES, ROOT)), f"{folder}: no {name}"
    for name in re.findall(r"build/tests/(\w[\w-]*)", text):
        assert any(ROOT.glob(f"*/native/{name}.cpp")) or name in ("bench_kernels", "ggml-graph"), name


def test_prose_names_files_that_exist() -> None:
    """folder/file of ggml-kvq/ in documents and comments. docs/adding-a-method.md and its test add some."""
    name = re.compile(rf"(?<![\w./-])(?:ggml-kvq/)?((?:{'|'.join(ALLOWED)})/(?:\w+/)?\w+\.(?:h|cpp|cuh?|inc))\b")
    wrong = []
    for place in PROSE:
        top = ROOT / place
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.suffix not in (".md", ".py", ".h", ".cpp", ".cu", ".cuh", ".sh", ".cmake") or "adding" in path.name:
                continue
            for i, line in enumerate(path.read_text().splitlines(), 1):
                wrong += [
                    f"{path.relative_to(ROOT)}:{i} names {m[1]}"
                    for m in name.finditer(line)
                    if not (SOURCES / m[1]).exists()
                    and not (path.parent / m[1]).exists()
                    and m[1] not in ("include/llama.h", "policy/NAME.cpp")
                ]
    assert not wrong, "\n".join(wrong)


def test_comments_name_the_file_that_defines() -> None:
    """`f(...); // name.cu` says where f is defined; any other file that a comment of ggml-kvq/ names exists."""
    sources = [p for p in sorted(SOURCES.rglob("*")) if p.suffix in (".h", ".cpp", ".cu", ".cuh")]
    known = {p.name for f in ("ggml-kvq", "tests", "scripts", "python", "docs") for p in (ROOT / f).rglob("*.*")}
    known |= {"llama.cpp", "llama.h", "ggml.h"}
    wrong, seen = [], 0
    for path in sources:
        for i, line in enumerate(path.read_text().splitlines(), 1):
            code, _, comment = line.partition("//")
            for name in re.findall(r"(?<![\w*./-])(\w+\.(?:h|cpp|cuh?|inc|py))\b", comment):
                wrong += [f"{path.relative_to(ROOT)}:{i} names {name}"] * (name not in known)
            declared = re.search(r"\b(kvq_\w+)\(.*\);\s*$", code)
            where = re.fullmatch(r"\s*(\w+\.(?:cu|cpp))\s*", comment)
            if declared and where:
                seen += 1
                room = path.relative_to(SOURCES).parts[0]
                place = next((SOURCES / room).rglob(where[1]), None)
                defined = place and re.search(rf"^\w[^;\n]*\b{declared[1]}\(", place.read_text(), re.MULTILINE)
                wrong += [f"{path.relative_to(ROOT)}:{i} says {where[1]} defines {declared[1]}"] * (not defined)
    assert seen > 5 and not wrong, "\n".join(wrong)


#: Words that make a reader stop: say which thing is absent, or who does it.
RIDDLES = re.compile(
    r"\bnobody\b|\bwhoever\b|\bof before\b|\b(?:is|are|was|were|had) none\b|: none\b|\bor none\b", re.I
)


def test_prose_and_comments_name_what_is_absent() -> None:
    """Read once, by someone whose second language is English: "0: no kernel", not "0: none"."""
    wrong, skipped = [], [SOURCES / name for name in ("host", "methods", "include")]
    for path in sorted([*(ROOT / "docs").rglob("*.md"), *SOURCES.rglob("*.*")]):
        if path.suffix not in (".md", ".h", ".cpp", ".cu", ".cuh", ".inc") or path.parent in skipped:
            continue
        if path.name in ("llama-cpp.md", "adding-a-method.md"):
            continue
        for i, line in enumerate(path.read_text().splitlines(), 1):
            text = re.sub(r"`[^`]*`", "", line) if path.suffix == ".md" else line.partition("//")[2]
            if not text.startswith("    ") and RIDDLES.search(text):
                wrong.append(f"{path.relative_to(ROOT)}:{i}: {line.strip()}")
    assert not wrong, "\n".join(wrong)


# ------------------------------------------------------------------ Python


def python_imports() -> dict[str, set[str]]:
    """Module of ggml_kvq -> those that it imports, within functions too; not what only a type checker reads."""
    top = ROOT / "python" / "ggml_kvq"
    files = {p: ".".join(p.relative_to(top).with_suffix("").parts) for p in sorted(top.rglob("*.py"))}
    names = {name.removesuffix("__init__").removesuffix(".") for name in files.values()}
    out: dict[str, set[str]] = {}
    for path, name in files.items():
        package = ("ggml_kvq." + name).rpartition(".")[0].split(".")
        found: set[str] = set()
        waiting: list[ast.AST] = [ast.parse(path.read_text())]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            waiting += ast.iter_child_nodes(node)
            if isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                inner = [f"{base}.{alias.name}" for alias in node.names]
                found |= {x if x.removeprefix("ggml_kvq.") in names else base for x in inner}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        own = name.removesuffix("__init__").removesuffix(".")
        out[own] = {x.removeprefix("ggml_kvq.") for x in found if x.startswith("ggml_kvq.")} & names - {own}
    return out


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        return list(e.args[1])
    return []


def test_python_modules_import_in_no_circle() -> None:
    graph = python_imports()
    assert "core.native" in graph["resolver"] and "evaluate.perplexity" in graph["core.model"], "imports are lost"
    without = {a: {b for b in bs if (a, b) not in PYTHON_EXCEPTIONS} for a, bs in graph.items()}
    assert not circle(without), " <- ".join(circle(without))
    for a, b in PYTHON_EXCEPTIONS:
        assert circle({**without, a: without[a] | {b}}), f"{a} -> {b} closes no circle: no exception"


def test_the_binding_knows_no_launcher() -> None:
    """core/ is what a Python program uses, launch/ what a command line does."""
    up = {a: bs for a, bs in python_imports().items() if a.startswith("core") and any("launch" in b for b in bs)}
    assert not up, up


def test_kernels_that_may_start_early_wait() -> None:
    """A kernel launched with kvq_launch_early may run before what it reads is written, unless it waits itself."""
    seen = 0
    for path in sorted((SOURCES / "cuda").rglob("*.cu")):
        text = path.read_text()
        launched = set(re.findall(r"kvq_launch(?:_early)?\(\s*(?:[^,()]*\? )?(\w+_kernel)\b", text))
        if re.search(r"kvq_launch_early\(\s*kernel\b", text):  # auto kernel = one of two
            launched |= set(re.findall(r"\w+_kernel\b", " ".join(re.findall(r"auto kernel = [^;]*;", text))))
        for name in launched:
            body = re.search(rf"__global__[^;{{}}]*\b{name}\([^{{}}]*\) \{{(.*?)\n}}", text, re.DOTALL)
            assert body, f"{path.name}: {name} is launched early and defined elsewhere"
            assert "early_wait()" in body[1], f"{path.name}: {name} is launched early and never waits"
            seen += 1
    assert seen >= 15
