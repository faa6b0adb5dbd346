"""Builds that work on the machine they were built on: the probe of the compiler for AMX, the self-check.

The findings are held against object code, so that no test asks for a CPU that has AMX.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ggml_kvq import _paths
from ggml_kvq.core import loader

ROOT = Path(__file__).resolve().parent.parent
X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX and its emulation are of x86-64")
NO_AMX = ["-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16"]


def run(argv: list[str | Path], *, ok: bool = True, cwd: Path | None = None, env: dict[str, str] | None = None) -> Any:
    words = [str(a) for a in argv]
    environment = {**os.environ, **(env or {})}
    r = subprocess.run(words, check=False, capture_output=True, text=True, timeout=900, env=environment, cwd=cwd)
    assert not ok or r.returncode == 0, r.stdout[-3000:] + r.stderr[-3000:]
    return r


@pytest.fixture(scope="module")
def source() -> Path:
    """The pinned llama.cpp, which the installed libraries were built from."""
    return Path(run(["python3", ROOT / "scripts/fetch_llama_cpp.py"]).stdout.strip())


# ------------------------------------------------------------------ AMX


def probe(compiler: str, flags: str, tmp_path: Path) -> str:
    script = tmp_path / "probe.cmake"
    call = f'kvq_amx_probe(finding {compiler} "{flags}")'
    script.write_text(f'include({ROOT}/cmake/amx_probe.cmake)\n{call}\nmessage("finding=${{finding}}")\n')
    found = re.search(r"finding=(\w+)", run(["cmake", "-P", script], cwd=tmp_path).stderr)
    assert found
    return found[1]


def what_ldtilecfg_would_read(compiler: str, flags: list[str], tmp_path: Path) -> bytes:
    """The 64 bytes at the operand of ldtilecfg: four copies of 16 bytes stand in for the instruction."""
    (tmp_path / "load.cpp").write_text("""
        #include <immintrin.h>
        struct config {
            unsigned char palette, start_row, reserved[14];
            unsigned short columns[16];
            unsigned char rows[16];
        };
        void load() {
            config c = {};
            c.palette = 1;
            for (int i = 0; i < 8; i++) { c.rows[i] = i + 1; c.columns[i] = 64 + i; }
            _tile_loadconfig(&c);
        }""")
    (tmp_path / "main.cpp").write_text("""
        #include <stdio.h>
        #include <string.h>
        extern "C" { unsigned char seen[64]; }
        void load();
        static void dirt() { volatile char x[512]; memset((char *) x, 0xEE, sizeof x); }
        int main() { dirt(); load(); for (unsigned char b : seen) { printf("%02x", b); } }""")
    run([compiler, *flags, "-mamx-tile", "-O2", "-S", "load.cpp"], cwd=tmp_path)
    text = (tmp_path / "load.s").read_text()
    copies = "".join(f"\tmovdqu\t{o}(%rax), %xmm0\n\tmovdqu\t%xmm0, seen+{o}(%rip)\n" for o in range(0, 64, 16))
    text, n = re.subn(r"\tldtilecfg\t(.*)\n", lambda m: f"\tleaq\t{m[1]}, %rax\n{copies}", text)
    assert n == 1
    (tmp_path / "load.s").write_text(text)
    run([compiler, "-O1", "main.cpp", "load.s", "-o", "load"], cwd=tmp_path)
    return bytes.fromhex(run([tmp_path / "load"]).stdout)


@X86
@pytest.mark.parametrize("compiler", ["c++", "clang++"])
def test_the_probe_finds_what_the_instruction_would_read(compiler: str, tmp_path: Path) -> None:
    if not shutil.which(compiler):
        pytest.skip(f"no {compiler} here")
    finding = probe(compiler, "", tmp_path)
    if finding == "none":
        pytest.skip(f"{compiler} knows no AMX")
    columns = b"".join((64 + i).to_bytes(2, "little") for i in range(8))
    want = bytes([1] + [0] * 15) + columns + bytes(16) + bytes([*range(1, 9)]) + bytes(8)
    seen = what_ldtilecfg_would_read(compiler, [], tmp_path)
    assert finding == ("right" if seen == want else "dropped"), seen.hex()
    assert probe(compiler, "-march=sapphirerapids", tmp_path) == finding


@X86
def test_the_probe_knows_both_answers(tmp_path: Path) -> None:
    """The compiler at hand with another intrinsic: one with the right operand, one with the wrong one."""
    if probe("c++", "", tmp_path) == "none":
        pytest.skip("this compiler knows no AMX")
    for name, operand in (("right", "*(const char (*)[64]) p"), ("dropped", "*(const void * const *) p")):
        header = tmp_path / f"{name}.h"
        body = f'{{ __asm__ volatile("ldtilecfg %0" :: "m"({operand})); }}'
        function = f"static inline void kvq_load(const void * p) {body}"
        undo, define = "#undef _tile_loadconfig", "#define _tile_loadconfig kvq_load"
        header.write_text("\n".join(["#include <immintrin.h>", undo, function, define, ""]))
        assert probe("c++", f"-include {header}", tmp_path) == name
    assert probe("c++", "-m32", tmp_path) == "none"
    assert probe("false", "", tmp_path) == "none"


FAKE_COMPILER = r"""#!/bin/sh
# What cmake/llama_cpu.cmake asks of a compiler, in no time. Its name says how it compiles AMX, and for which CPU
# natively.
me=$(basename "$0")
case "$me $*" in
    ignorant*-mamx*|ignorant*-mno-amx*|old*-mavxvnni*|no-sme*+sme*|old*+i8mm*) exit 1;;
    *-S*) case $me in wrong*) echo ldtilecfg;; *) cat probe.cpp; echo ldtilecfg;; esac > probe.s;;
    *sapphire*-dM*|*on-amx*native*) echo "#define __AMX_TILE__ 1";;
    *on-fp16*native*-dM*|*-mavx512fp16*-dM*) echo "#define __AVX512FP16__ 1";;
esac
"""


def decide(tmp_path: Path, compiler: str, processor: str = "x86_64", **settings: str) -> tuple[dict[str, str], str]:
    """What cmake/llama_cpu.cmake passes on to llama.cpp, and what it says, for variables that a user sets."""
    fake = tmp_path / compiler
    fake.write_text(FAKE_COMPILER)
    fake.chmod(0o755)
    known = {
        "CMAKE_C_COMPILER": str(fake),
        "CMAKE_CXX_COMPILER": str(fake),
        "CMAKE_CXX_COMPILER_ID": "GNU",
        "CMAKE_CXX_COMPILER_VERSION": "1.2",
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": processor,
    }
    lines = ["function(kvq_setting name value)", '  message("setting ${name}=${value}")', "endfunction()"]
    lines += [f"set({k} [==[{v}]==])" for k, v in known.items()]
    lines += [f'set({k} [==[{v}]==] CACHE STRING "")' for k, v in settings.items()]
    script = tmp_path / "decide.cmake"
    script.write_text("\n".join([*lines, f"include({ROOT}/cmake/llama_cpu.cmake)"]))
    r = run(["cmake", "-P", script], cwd=tmp_path, ok=False)
    return dict(re.findall(r"^setting (\w+)=(.*)$", r.stderr, re.M)), " ".join((r.stdout + r.stderr).split())


FLAGS = {"KVQ_CPU_FLAGS": " ".join(NO_AMX)}
NO_FP16 = {"KVQ_CPU_FLAGS": "-mno-avx512fp16"}
OFF = {"GGML_NATIVE": "OFF"}
TRAVELS = {**OFF, "GGML_BACKEND_DL": "ON", "GGML_CPU_ALL_VARIANTS": "ON"}
SAPPHIRE = {"CMAKE_CXX_FLAGS": "-march=sapphirerapids"}


@pytest.mark.parametrize(
    ("compiler", "user", "given", "said"),
    [
        ("wrong", {}, {}, "AMX: miscompiled by GNU 1.2 (it drops the stores before ldtilecfg); not in use"),
        ("wrong-on-amx", {}, FLAGS, f"before ldtilecfg); llama.cpp is built with {' '.join(NO_AMX)}"),
        ("right-on-amx", {}, {}, "AMX: compiled right by GNU 1.2; in use"),
        ("right-on-amx", {"KVQ_AMX": "OFF"}, FLAGS, "compiled for this CPU alone"),
        ("wrong-on-amx", {"KVQ_AMX": "ON"}, {}, "(it drops the stores before ldtilecfg); in use"),
        ("ignorant", {"KVQ_AMX": "OFF"}, {}, "AMX: not known to GNU 1.2"),
        ("wrong", OFF, {**TRAVELS, **FLAGS}, "compiled for every CPU of this family"),
        ("right", OFF, TRAVELS, "AMX: compiled right by GNU 1.2; in use"),
        ("wrong", {**OFF, "GGML_AVX512": "ON"}, OFF, "the instruction sets that were named (GGML_AVX512)"),
        ("wrong", {**OFF, "GGML_AMX_TILE": "ON"}, {**OFF, **FLAGS}, "llama.cpp is built with"),
        ("wrong", {**OFF, "GGML_BACKEND_DL": "OFF"}, OFF, "AVX2 on x86-64 (GGML_BACKEND_DL=OFF)"),
        ("wrong", {**OFF, "GGML_BACKEND_DL": "OFF", **SAPPHIRE}, {**OFF, **FLAGS}, "llama.cpp is built with"),
        ("wrong", {**OFF, "GGML_CUDA": "ON"}, OFF, "variants are not built together with CUDA"),
        ("wrong", {"KVQ_AMX": "maybe"}, {}, "KVQ_AMX=maybe: give AUTO, ON or OFF"),
        ("wrong", {**TRAVELS, "GGML_CUDA": "ON"}, OFF, "must not be a module; drop one of them"),
        ("old", OFF, TRAVELS, "old (GNU 1.2) does not know -mavxvnni"),
        ("right-on-fp16", {}, NO_FP16, "compiled for this CPU alone (GGML_NATIVE), without AVX512-FP16"),
        ("right-on-fp16", {"CMAKE_CXX_FLAGS": "-mavx512fp16"}, {}, "compiled for this CPU alone (GGML_NATIVE) --"),
        ("right-on-fp16", OFF, TRAVELS, "compiled for every CPU of this family"),
    ],
)
def test_what_is_decided(tmp_path: Path, compiler: str, user: dict[str, str], given: dict[str, str], said: str) -> None:
    got, text = decide(tmp_path, compiler, **user)
    assert got == given and said in text, text


@pytest.mark.parametrize(
    ("compiler", "given", "said"),
    [
        ("ignorant", TRAVELS, "every CPU of this family"),
        ("no-sme", {**TRAVELS, "KVQ_WITHOUT_SME": "ON"}, "every CPU of this family"),
        ("old", TRAVELS, "does not know -march=armv8.6-a+dotprod+fp16+sve+i8mm+sve2"),
    ],
)
def test_variants_for_aarch64_do_not_need_sme(tmp_path: Path, compiler: str, given: dict[str, str], said: str) -> None:
    got, text = decide(tmp_path, compiler, "aarch64", **OFF)
    assert got == given and said in text, text


def test_without_sme_the_last_march_is_one_that_the_compiler_knows(tmp_path: Path) -> None:
    """cmake/llama_arm_flags.cmake on targets like upstream's, in a folder below that of ggml's project()."""
    upstream = {
        "8.6_1": "armv8.6-a+sve+i8mm",
        "9.2_1": "armv9.2-a+sve+i8mm+sme",
        "9.2_2": "armv9.2-a+sve+i8mm+sve2+sme",
    }
    (tmp_path / "src").mkdir()
    (tmp_path / "a.c").touch()
    top = ["cmake_minimum_required(VERSION 3.21)", "project(ggml LANGUAGES C)", "add_subdirectory(src)"]
    targets = [
        f"add_library(ggml-cpu-armv{name}{kind} OBJECT ../a.c)\n"
        f"target_compile_options(ggml-cpu-armv{name}{kind} PRIVATE -march={march})"
        for name, march in upstream.items()
        for kind in ("", "-feats")
    ]
    (tmp_path / "CMakeLists.txt").write_text("\n".join(top))
    (tmp_path / "src/CMakeLists.txt").write_text("\n".join(targets))
    options = ["-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", f"-DCMAKE_PROJECT_ggml_INCLUDE={ROOT}/cmake/llama_arm_flags.cmake"]
    run(["cmake", "-S", tmp_path, "-B", tmp_path / "b", "-G", "Ninja", *options])
    commands = json.loads((tmp_path / "b/compile_commands.json").read_text())
    found = {re.findall(r"ggml-cpu-armv([^/]*)\.dir", c["command"])[0]: c["command"].split() for c in commands}
    march = {name: [w for w in words if w.startswith("-march=")] for name, words in found.items()}
    for name, wanted in upstream.items():
        assert march[name + "-feats"] == [f"-march={wanted}"]
    assert march["8.6_1"] == ["-march=armv8.6-a+sve+i8mm"]
    assert march["9.2_1"][-1] == "-march=armv8.6-a+dotprod+fp16+sve+i8mm"
    assert march["9.2_2"][-1] == "-march=armv8.6-a+dotprod+fp16+sve+i8mm+sve2"


def disassembly(path: Path) -> str:
    return run(["objdump", "-d", "--no-show-raw-insn", path]).stdout


@X86
def test_no_amx_where_the_flags_are_given(source: Path, tmp_path: Path) -> None:
    """Upstream's AMX code for a CPU that has it: the object loads a tile configuration, with the flags it does not."""
    if probe("c++", "", tmp_path) == "none":
        pytest.skip("this compiler knows no AMX")
    ggml = source / "ggml"
    include = [f"-I{ggml}/include", f"-I{ggml}/src", f"-I{ggml}/src/ggml-cpu"]
    code = ggml / "src/ggml-cpu/amx/mmq.cpp"
    argv: list[str | Path] = ["c++", "-std=c++17", "-march=sapphirerapids", "-O1", "-fPIC", *include, "-c", code]
    for flags, present in (([], True), (["-mamx-tile", "-mamx-int8", *NO_AMX], False)):
        run([*argv, *flags, "-o", tmp_path / "mmq.o"])
        assert ("ldtilecfg" in disassembly(tmp_path / "mmq.o")) == present, flags


def test_the_installed_libraries_keep_to_what_the_build_says() -> None:
    info = loader.build_info(_paths.lib_dir())
    if not info:
        pytest.skip("KVQ_LIB_DIR names a llama.cpp that this package did not build")
    assert set(info) == {"compiler", "cpu", "amx", "self-check"}
    libraries = sorted(_paths.lib_dir().glob("libggml-cpu*.so*"))
    assert libraries
    if "-mno-amx" in info["amx"] or "not in use" in info["amx"]:
        for library in libraries:
            assert "ldtilecfg" not in disassembly(library), library
    shown = run([sys.executable, "-m", "ggml_kvq"])
    for value in info.values():
        assert value in shown.stdout


# ------------------------------------------------------------------ self-check


@pytest.fixture(scope="module")
def self_check(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cmake/self_check.cpp, as the build compiles it; it finds libggml-base through LD_LIBRARY_PATH."""
    program = tmp_path_factory.mktemp("self-check") / "self-check"
    base = _paths.shared_library(_paths.lib_dir(), "ggml-base")
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{source}/ggml/include"]
    run(["c++", *flags, ROOT / "cmake/self_check.cpp", base, "-ldl", "-o", program])
    return program


def check(program: Path, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return run([program, folder, "GNU 1.2.3"], ok=False, env={"LD_LIBRARY_PATH": str(_paths.lib_dir()), **env})


@pytest.fixture(scope="module")
def broken(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken")
    base = _paths.shared_library(_paths.lib_dir(), "ggml-base")
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{source}/ggml/include", f"-I{source}/ggml/src"]
    run(["c++", *flags, ROOT / "tests/broken_cpu.cpp", base, "-ldl", "-o", folder / "libggml-cpu-broken.so"])
    return folder


def test_the_installed_backend_multiplies_right(self_check: Path) -> None:
    r = check(self_check, _paths.lib_dir())
    assert r.returncode == 0, r.stderr
    found = re.search(r"(\d+) weight types in (\d+) buffer types", r.stdout)
    assert found and int(found[1]) >= 20 and int(found[2]) >= 1, r.stdout


KINDS = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K"]
KINDS += ["iq4_nl", "iq1_m", "mxfp4"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_product_is_found_for_every_type(self_check: Path, broken: Path, kind: str) -> None:
    r = check(self_check, broken, KVQ_REAL_CPU=str(_real_cpu()), KVQ_FAULT="wrong", KVQ_FAULT_TYPE=kind)
    assert r.returncode == 1 and r.stdout == ""
    who = r"ggml-kvq: self-check: libggml-cpu-broken.so, built by GNU 1.2.3, is wrong"
    what = rf"in products with {kind} weights \(buffer \w+, 1 column\): row 7 of column 0 is \S+ instead of \S+\."
    assert re.fullmatch(rf"{who} {what} Cure: .*-DKVQ_SELF_CHECK=OFF.*\n", r.stderr), r.stderr


@pytest.mark.parametrize(("fault", "end"), [("crash", "Segmentation fault"), ("abort", "Aborted")])
def test_a_crash_is_told_in_one_line(self_check: Path, broken: Path, fault: str, end: str) -> None:
    r = check(self_check, broken, KVQ_REAL_CPU=str(_real_cpu()), KVQ_FAULT=fault, KVQ_FAULT_TYPE="q6_K")
    assert r.returncode == 1 and r.stdout == "" and r.stderr.count("\n") == 1
    assert f"broken.so, built by GNU 1.2.3, dies ({end}) in products with q6_K weights" in r.stderr


def test_a_folder_without_a_backend_for_this_cpu(self_check: Path, broken: Path, tmp_path: Path) -> None:
    r = check(self_check, broken, KVQ_REAL_CPU=str(_real_cpu()), KVQ_FAULT="foreign")
    assert r.returncode == 1 and "this CPU can run none of libggml-cpu-broken.so" in r.stderr
    r = check(self_check, tmp_path)
    assert r.returncode == 2 and "holds no libggml-cpu" in r.stderr
    (tmp_path / "libggml-cpu.so.0").write_bytes(b"no library")
    r = check(self_check, tmp_path)
    assert r.returncode == 1 and "is wrong while it is loaded" in r.stderr


def _real_cpu() -> Path:
    """A CPU backend that runs here: the linked one, or the variant that ggml chose."""
    loader.libraries()
    return Path(sorted(loader._mapped_copies("libggml-cpu"))[0])
