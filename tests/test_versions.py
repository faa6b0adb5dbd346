"""More than one llama.cpp: fields are found, facts that no longer hold are named, the oldest tree runs."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT
from ggml_kvq import _paths, errors
from ggml_kvq.core import llama, loader
from object_cache import launcher


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


fetch = load_script("fetch_llama_cpp")


# ------------------------------------------------------------------ fields


class Probe:
    """Stands in for libggml-kvq over another llama.cpp: kvq_sizeof and kvq_offsetof of a structure with `fields`."""

    def __init__(self, fields: list[tuple[str, object]]) -> None:
        self.struct = type("there", (ctypes.Structure,), {"_fields_": fields})

    def kvq_sizeof(self, _name: bytes) -> int:
        return ctypes.sizeof(self.struct)

    def kvq_offsetof(self, _name: bytes, field: bytes) -> int:
        there = getattr(self.struct, field.decode(), None)
        return ctypes.c_size_t(-1).value if there is None else int(there.offset)


def older_fields() -> list[tuple[str, object]]:
    """llama_model_params of ggml 0.15: three flags instead of load_mode, no lazy_mode, no load_mtp."""
    pinned = {f[0]: f[1] for f in llama.llama_model_params._fields_}
    other = dict(llama.OTHER_FIELDS["llama_model_params"])
    names = [n for n in pinned if n not in ("load_mode", "lazy_mode", "load_mtp")]
    names[names.index("check_tensors") : names.index("check_tensors")] = ["use_mmap", "use_direct_io", "use_mlock"]
    return [(n, {**pinned, **other}[n]) for n in names]


def test_the_pinned_structures_fit_the_pinned_library() -> None:
    kvq = loader.libraries().need_kvq()
    for name in llama.OTHER_FIELDS:
        assert loader.fit_struct(kvq, name) is llama.STRUCTS[name]


def test_a_structure_is_built_from_the_fields_of_an_older_library() -> None:
    fields = older_fields()
    fitted = loader.fit_struct(Probe(fields), "llama_model_params")  # type: ignore[arg-type]
    assert [f[0] for f in fitted._fields_] == [f[0] for f in fields]
    assert not hasattr(fitted, "load_mode") and hasattr(fitted, "use_mmap")


@pytest.mark.parametrize("at", [0, 5, -1])
def test_a_field_that_is_not_known_is_refused(at: int) -> None:
    fields = older_fields()
    fields.insert(len(fields) if at < 0 else at, ("from_the_future", ctypes.c_int64))
    with pytest.raises(errors.LibraryError, match="llama_model_params.* bytes.*not supported"):
        loader.fit_struct(Probe(fields), "llama_model_params")  # type: ignore[arg-type]


# ------------------------------------------------------------------ facts


CHANGES = {
    "a new interface": (
        "ggml/src/ggml-backend-impl.h",
        "#define GGML_BACKEND_API_VERSION 2",
        "#define GGML_BACKEND_API_VERSION 4",
        "GGML_BACKEND_API_VERSION is 4, this source knows 2 and 3",
    ),
    "a member is gone": (
        "ggml/src/ggml-backend-impl.h",
        "(*memset_tensor)",
        "(*fill_tensor)",
        "ggml_backend_buffer_i::memset_tensor is not there or no longer",
    ),
    "other arguments": (
        "ggml/src/ggml-backend-impl.h",
        "(*supports_buft)(ggml_backend_dev_t dev, ",
        "(*supports_buft)(ggml_backend_dev_t dev, int n, ",
        "ggml_backend_device_i::supports_buft",
    ),
    "a member lies elsewhere": (
        "ggml/src/ggml-backend-impl.h",
        "enum ggml_backend_dev_type (*get_type)(ggml_backend_dev_t dev);",
        "void * more; enum ggml_backend_dev_type (*get_type)(ggml_backend_dev_t dev);",
        "ggml_backend_device::iface.get_type is not at byte 24",
    ),
    "a field of llama.h": (
        "include/llama.h",
        "enum llama_flash_attn_type   flash_attn_type;",
        "bool flash_attn;",
        "llama_context_params::flash_attn_type",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_cmake_names_the_fact_that_no_longer_holds(change: str, tmp_path: Path) -> None:
    file, old, new, fact = CHANGES[change]
    source, tree = fetch.ensure_source(fetch.default_cache().absolute()), tmp_path / "tree"
    for part in ("ggml/include", "include"):
        shutil.copytree(source / part, tree / part)
    (tree / "ggml" / "src").mkdir()
    for header in (source / "ggml" / "src").glob("*.h"):
        shutil.copy(header, tree / "ggml" / "src")
    shutil.copy(source / "ggml" / "CMakeLists.txt", tree / "ggml")
    configure = ["cmake", "-S", str(ROOT), "-B", str(tmp_path / "build"), "-G", "Ninja", f"-DLLAMA_CPP_DIR={tree}"]
    text = (tree / file).read_text()
    assert text.count(old) == 1
    (tree / file).write_text(text.replace(old, new))
    done = subprocess.run(configure, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0 and "another backend interface" in done.stderr, done.stderr
    assert fact in done.stderr.replace("\n", " "), done.stderr
    assert len(done.stderr.splitlines()) < 40, done.stderr


# ------------------------------------------------------------------ layouts

layouts = load_script("make_layouts")


def test_the_numbers_of_the_pinned_headers_are_those_that_are_written_down() -> None:
    """scripts/make_layouts.py compares all known versions; the others have to be fetched for it."""
    source = fetch.ensure_source(fetch.default_cache().absolute())
    script = [sys.executable, str(ROOT / "scripts" / "make_layouts.py"), "--check", str(source)]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_number_that_has_changed_is_named(tmp_path: Path) -> None:
    source, tree = fetch.ensure_source(fetch.default_cache().absolute()), tmp_path / "tree"
    for part in ("include", "src"):
        shutil.copytree(source / "ggml" / part, tree / "ggml" / part, ignore=shutil.ignore_patterns("ggml-*/", "*.c*"))
    shutil.copy(source / "ggml" / "CMakeLists.txt", tree / "ggml")
    header = tree / "ggml" / "src" / "ggml-backend-impl.h"
    text = header.read_text()
    header.write_text(text.replace("bool (*supports_op)", "void * more; bool (*supports_op)"))
    script = [sys.executable, str(ROOT / "scripts" / "make_layouts.py"), "--check", str(tree)]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    said = "KVQ_MEMBER(ggml_backend_device, iface.supports_op) is 80 in ggml 0.25.3, the file says 72"
    assert done.returncode == 1 and said in done.stderr, done.stderr


def test_every_version_that_can_be_fetched_has_a_row() -> None:
    """Two sdists of llama-cpp-python may carry one version of ggml."""
    rows = layouts.written(layouts.FILE.read_text())[1]
    assert {row[0] for row in rows.values()} == {2, 3} and len({tuple(row) for row in rows.values()}) == 2
    assert {"0.15.1", "0.15.3", "0.16.0", "0.20.0", "0.25.3", "0.26.0"} <= set(rows)


NVCC = os.environ.get("CUDACXX") or shutil.which("nvcc")


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_the_private_context_of_the_pinned_ggml_cuda_is_as_written_down() -> None:
    source = fetch.ensure_source(fetch.default_cache().absolute())
    script = [sys.executable, str(ROOT / "scripts" / "make_layouts.py"), "--cuda", "--check", str(source)]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_private_context_of_ggml_cuda_is_known_by_version(tmp_path: Path) -> None:
    """Known are versions that have run on a GPU, and those between two of them. Below and above nobody knows it."""
    rows = layouts.written(layouts.CUDA_FILE.read_text())[1]
    assert {tuple(map(int, v.split("."))) for v in rows} == set(layouts.RAN_ON_A_GPU)
    (tmp_path / "main.cpp").write_text(
        '#include "host/layout.h"\n#include <cstdio>\nint main(int n, char ** v) {\n    std::string err;\n'
        "    for (int i = 1; i < n; i++) {\n        if (!kvq_choose_layout(v[i], 0, err)) { return 1; }\n"
        '        printf("%zu\\n", kvq_layout_here.cuda_graphs);\n    }\n}\n'
    )
    ggml = fetch.ensure_source(fetch.default_cache().absolute()) / "ggml"
    include = [f"-I{p}" for p in (ROOT / "ggml-kvq", ggml / "include", ggml / "src")]
    source = [str(tmp_path / "main.cpp"), str(ROOT / "ggml-kvq" / "host" / "layout.cpp")]
    command = ["c++", "-std=c++17", '-DKVQ_GGML_VERSION="0.25.3"', *include, *source, "-o", str(tmp_path / "main")]
    subprocess.run(command, check=True)
    asked = ["0.15.1", "0.15.9", "0.20.0", "0.23.0", "0.25.3", "0.25.9", "0.26.0", "0.26.1"]
    said = subprocess.run([str(tmp_path / "main"), *asked], capture_output=True, text=True, check=True).stdout
    new = rows["0.25.3"][0]
    assert [int(x) for x in said.split()] == [0, 0, 0, 0, new, new, new, 0]


# ------------------------------------------------------------------ trees


def test_only_known_versions_are_fetched() -> None:
    module = load_script("fetch_llama_cpp")
    with pytest.raises(module.FetchError, match=r"0\.3\.1 is not known here; known: 0\.3\.36, 0\.3\.35"):
        module.choose("0.3.1")
    module.choose("0.3.32")
    assert module.ARCHIVE == "llama_cpp_python-0.3.32.tar.gz" and module.OLDER["0.3.32"][0] == module.SHA256
    assert module.COMMIT[:9] not in module.FOLDER
    module.choose("0.3.36")
    assert module.COMMIT[:9] in module.FOLDER and module.SHA256 == fetch.SHA256


def test_readme_names_the_range() -> None:
    oldest = min(fetch.OLDER, key=lambda v: [int(x) for x in v.split(".")])
    assert f"llama-cpp-python {oldest} to {fetch.VERSION}" in " ".join((ROOT / "README.md").read_text().split())


def test_the_oldest_llama_cpp_builds_and_runs(tmp_path: Path) -> None:
    """Fetched and built once into the cache (minutes): scripts/check_llama_versions.py."""
    oldest = min(fetch.OLDER, key=lambda v: [int(x) for x in v.split(".")])
    script = str(ROOT / "scripts" / "check_llama_versions.py")
    command = [sys.executable, script, oldest, "--libraries", "--build", str(tmp_path)]
    env = {**os.environ, "CHECK_CXX_LAUNCHER": launcher(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3000, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.match(rf"\| {oldest} \| 0\.15\.1 \| [0-9.]+ \| - \|", done.stdout.splitlines()[-1])


def test_one_library_runs_in_the_oldest_and_in_the_newest_llama_cpp(tmp_path: Path) -> None:
    """The one of this installation: perplexities, the text behind a restored state."""
    trees = [min(fetch.OLDER, key=lambda v: [int(x) for x in v.split(".")]), list(fetch.NEWER)[-1]]
    script = str(ROOT / "scripts" / "check_llama_versions.py")
    command = [sys.executable, script, *trees, "--library", str(_paths.backend()), "--build", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split(" | ") for line in done.stdout.splitlines()[-2:]]
    assert [row[1] for row in rows] == ["0.15.1", "0.26.0"] and rows[0][5] == rows[1][5], done.stdout
