"""docs/adding-a-method.md as it stands: its files are put into a copy of the tree, compiled and run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import object_cache
import pytest

ROOT = Path(__file__).resolve().parents[1]
CXX = os.environ.get("CXX") or shutil.which("g++")
FOLDERS = ("cpu", "engine", "methods", "plan", "policy", "store", "types")  # that need no ggml
ISA = {
    "kernels_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "kernels_avx512": ["-mavx2", "-mfma", "-mf16c", *(f"-mavx512{x}" for x in ("f", "bw", "dq", "vl", "vnni"))],
}
MAIN = r"""
#include "native/layer.h"
#include <cmath>

// Pages of `comb` seal with every n-th cell salient, and those come back with the smaller error.
int main() {
    const kvq_layer_context context = { 0, 1, { 0, 2, 64, 64 }, nullptr };
    for (int n = 2; n <= 8; n++) {
        const std::string opts = "n=" + std::to_string(n) + ",lo=1";
        cache_of_layers cache;
        composed_layer layer;
        layer.make(cache, plan_of("comb", opts.c_str(), context), 2, 1024, 1);
        std::vector<float> rows(1024 * 128);
        std::vector<int64_t> cells(1024);
        for (size_t i = 0; i < rows.size(); i++) { rows[i] = std::sin(0.37f * (float) (i * i % 9973)); }
        for (size_t i = 0; i < cells.size(); i++) { cells[i] = (int64_t) i; }
        for (auto & lane : layer.lane) {
            lane->write(1024, cells.data(), rows.data(), 128, 1);
            lane->commit(1);
            std::vector<uint16_t> back(rows.size());
            lane->read(0, 0, 1024, back.data());
            std::vector<float> values(back.size());
            kvq_cpu_f16_to_f32(back.data(), values.data(), (int64_t) back.size());
            const int page_cells = lane->layout().page_cells;
            int n_sealed = 0;
            for (int p = 0; p < lane->layout().n_pages; p++) {
                if (lane->state(0, p) != KVQ_PAGE_SEALED) { continue; }
                n_sealed++;
                double error[2] = {}, count[2] = {};
                for (int t = 0; t < page_cells; t++) {
                    for (int h = 0; h < 2; h++) {
                        const bool salient = lane->params_at(0, p, h)[t / 8] >> t % 8 & 1;
                        CHECK(salient == (t % n == 0), "page %d, cell %d of %d", p, t, page_cells);
                        for (int i = 0; i < 64; i++) {
                            const size_t at = (size_t) ((p * page_cells + t) * 128 + h * 64 + i);
                            error[salient] += std::fabs(values[at] - rows[at]);
                            count[salient] += 1;
                        }
                    }
                }
                CHECK(error[1] / count[1] * 3 < error[0] / count[0], "n=%d page %d: %g, %g", n, p,
                    error[1] / count[1], error[0] / count[0]);
            }
            CHECK(n_sealed >= lane->layout().n_pages - 1, "%d pages sealed of %d", n_sealed, lane->layout().n_pages);
        }
    }
    kvq_layer_plan plan;
    kvq_options o;
    std::string err;
    const kvq_method * comb = kvq_method_find("comb");
    CHECK(kvq_options_parse(*comb, "n=9", o, err) == KVQ_OK, "%s", err.c_str());
    CHECK(comb->plan(o, context, plan, err) == KVQ_ERR_OPTION && err == "option n=9 is not within 2..8",
        "%s", err.c_str());
    printf("ok\n");
    return 0;
}
"""
REFERENCE = """
import sys, types
import ggml_kvq.reference as reference
module = types.ModuleType("ggml_kvq.reference.comb")
module.__package__ = "ggml_kvq.reference"
exec(compile(open(sys.argv[1]).read(), sys.argv[1], "exec"), module.__dict__)
plan = reference.METHODS["comb"](n=3, lo=1).plan(0, 4, reference.LayerShape(0, 2, 64, 128), None)
k, v = plan.k.codec, plan.v.codec
assert (k.n_cells, k.n_hi, k.hi, k.bits, k.group, v.group) == (96, 32, 4, 1, 96, 128), plan
assert all(n > 0 for c in (k, v) for n in reference.nbytes(c))
print(*(list(reference.METHODS["comb"].options)))
"""


def files_of_the_document() -> dict[str, str]:
    """What each code block is: the file named last before it, a new one or a table that gets a row."""
    out: dict[str, str] = {}
    name, inside = "", False
    for line in (ROOT / "docs" / "adding-a-method.md").read_text().splitlines(keepends=True):
        if line.startswith("```"):
            inside = not inside
        elif inside:
            out[name] = out.get(name, "") + line
        else:
            names = [n for n in re.findall(r"`([\w/.-]+\.(?:cpp|inc|py))`", line) if "/" in n]
            name = names[-1] if names else name
    return out


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    found = files_of_the_document()
    assert list(found) == [
        "ggml-kvq/methods/comb.cpp",
        "ggml-kvq/methods.inc",
        "ggml-kvq/policy/every.cpp",
        "ggml-kvq/policy/policies.inc",
        "python/ggml_kvq/reference/comb.py",
    ]
    return found


@pytest.mark.skipif(CXX is None, reason="no C++ compiler")
def test_the_native_side_seals_as_it_says(files: dict[str, str], tmp_path: Path) -> None:
    tree = tmp_path / "ggml-kvq"
    shutil.copytree(ROOT / "ggml-kvq", tree, ignore=shutil.ignore_patterns("cuda", "host"))
    for name, text in files.items():
        path = tmp_path / name
        if path.suffix == ".inc":
            path.write_text(path.read_text() + text)
        elif path.suffix == ".cpp":
            path.write_text(text)
    (tmp_path / "main.cpp").write_text(MAIN)
    flags = ["-std=c++17", "-O0", "-w", "-fopenmp", f"-I{tree}", f"-I{tree / 'include'}", f"-I{ROOT / 'tests'}"]
    sources = [p for folder in FOLDERS for p in sorted((tree / folder).glob("*.cpp"))]
    keeper = [sys.executable, object_cache.__file__, f"--root={tmp_path}"]
    jobs = [[*keeper, str(CXX), *flags, *ISA.get(p.stem, []), "-c", str(p), "-o", f"{p}.o"] for p in sources]
    jobs.append([*keeper, str(CXX), *flags, "-c", str(tmp_path / "main.cpp"), "-o", str(tmp_path / "main.o")])

    def compiled(argv: list[str]) -> str:
        return subprocess.run(argv, check=False, capture_output=True, text=True, timeout=600).stderr

    # the document's own files come first, so that what is wrong there is seen at once; without warnings too
    for name in ("methods/comb.cpp", "policy/every.cpp"):
        strict = [CXX, "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{tree}", f"-I{tree / 'include'}"]
        assert not compiled([*map(str, strict), "-fsyntax-only", str(tree / name)]), name
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        errors = [e for e in pool.map(compiled, jobs) if e]
    assert not errors, errors[0][-3000:]
    program = tmp_path / "main"
    objects = [a[-1] for a in jobs]
    done = subprocess.run(
        [str(CXX), "-fopenmp", *objects, "-o", str(program)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    done = subprocess.run([str(program)], check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stdout + done.stderr


def test_the_definition_registers(files: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "comb.py"
    path.write_text(files["python/ggml_kvq/reference/comb.py"])
    done = subprocess.run(
        [sys.executable, "-c", REFERENCE, str(path)], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    native = re.findall(r'^    \{ "(\w+)"', files["ggml-kvq/methods/comb.cpp"].split("};", 1)[0], re.MULTILINE)
    assert done.stdout.split() == [*native, "state"]


def test_the_table_of_parts_is_the_table_of_policies() -> None:
    text = (ROOT / "docs" / "adding-a-method.md").read_text()
    rows = re.findall(r"^KVQ_POLICY\((\w+)\)", (ROOT / "ggml-kvq/policy/policies.inc").read_text(), re.MULTILINE)
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == rows
    for name in re.findall(r"`((?:policy|methods)/\w+\.(?:h|cpp))`", text):
        assert (ROOT / "ggml-kvq" / name).is_file(), name
