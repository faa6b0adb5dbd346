"""The folder of compiled objects: what was compiled before is not compiled again, and nothing else is taken for it."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import object_cache
import pytest

CXX = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
pytestmark = pytest.mark.skipif(CXX is None, reason="needs a C++ compiler")
# A compiler that counts how often it compiles; preprocessing and `-v` do not count.
COUNTING = '#!/bin/sh\ncase " $* " in *" -E "* | *" -v "*) ;; *) echo x >> {count} ;; esac\nexec {cxx} "$@"\n'


class Tree:
    """A source with a header, a counting compiler and a cache folder of its own."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache, self.count = folder, cache, folder / "count"
        folder.mkdir()
        (folder / "a.h").write_text("#define ANSWER 42\n")
        (folder / "a.cpp").write_text('#include "a.h"\nint main() { return __LINE__ - 2 + ANSWER; }\n')
        self.compiler = cache.parent / "counting-c++"
        self.compiler.write_text(COUNTING.format(count=cache.parent / "count", cxx=CXX))
        self.compiler.chmod(0o755)

    def build(self, *flags: str, link: bool = True, ok: bool = True) -> int:
        """Exit code of the built program."""
        out = self.folder / "out" / "a.o"
        out.parent.mkdir(exist_ok=True)
        command = [str(self.compiler), *flags, f"-I{self.folder}", "-MD", "-MT", "a.o", "-MF", "a.d"]
        done = subprocess.run(
            [
                *(sys.executable, object_cache.__file__, f"--root={self.folder}", *command),
                *("-c", str(self.folder / "a.cpp"), "-o", str(out)),
            ],
            cwd=out.parent,
            env={**os.environ, "KVQ_CACHE_DIR": str(self.cache)},
            capture_output=True,
            text=True,
        )
        self.said = done.stderr
        assert (done.returncode == 0) == ok, done.stderr
        if not link or not ok:
            return done.returncode
        assert f"{self.folder}/a.h" in (out.parent / "a.d").read_text()
        subprocess.run([str(CXX), str(out), "-o", str(self.folder / "program")], check=True)
        return subprocess.run([str(self.folder / "program")], check=False).returncode

    def compiled(self) -> int:
        count = self.cache.parent / "count"
        return len(count.read_text().split()) if count.exists() else 0


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "tree", tmp_path / "cache")


def test_the_same_text_is_compiled_once(tree: Tree, tmp_path: Path) -> None:
    assert [tree.build("-O1") for _ in range(3)] == [42] * 3 and tree.compiled() == 1
    other = Tree(tmp_path / "other", tree.cache)  # the same tree elsewhere
    assert other.build("-O1") == 42 and tree.compiled() == 1


def test_a_header_a_flag_or_a_definition_makes_another_object(tree: Tree) -> None:
    tree.build("-O1")
    header = tree.folder / "a.h"
    times = header.stat()
    header.write_text("#define ANSWER 43\n")
    os.utime(header, ns=(times.st_atime_ns, times.st_mtime_ns))  # times do not count
    assert tree.build("-O1") == 43 and tree.compiled() == 2
    assert tree.build("-O2") == 43 and tree.compiled() == 3
    (tree.folder / "a.cpp").write_text("#ifndef X\n#define X 1\n#endif\nint main() { return X; }\n")
    shutil.copy(tree.folder / "a.cpp", tree.folder / "b.cpp")
    for flags, code in (((), 1), (("-DX=7",), 7), (("-D", "X=9"), 9), ((), 1)):
        header.write_text("")
        (tree.folder / "a.cpp").write_text('#include "a.h"\n' + (tree.folder / "b.cpp").read_text())
        assert tree.build("-O1", *flags) == code
    assert tree.compiled() == 6


def test_another_compiler_makes_another_object(tree: Tree) -> None:
    tree.build("-O1")
    shutil.copy(tree.compiler, tree.compiler.with_name("other-c++"))
    tree.compiler = tree.compiler.with_name("other-c++")
    tree.build("-O1")
    assert tree.compiled() == 2


def test_errors_and_warnings_are_told_each_time(tree: Tree) -> None:
    (tree.folder / "a.cpp").write_text('#include "a.h"\nint main() { int unused; return 0; }\n')
    for _ in range(2):
        tree.build("-Wall")
        assert "unused" in tree.said
    (tree.folder / "a.cpp").write_text("int main() { return nothing; }\n")
    for _ in range(2):
        assert tree.build(ok=False) and "nothing" in tree.said


def test_a_damaged_object_is_compiled_again(tree: Tree) -> None:
    tree.build("-O1")
    (there,) = (tree.cache / "objects").glob("??/*")
    for data in (b"", there.read_bytes()[:-1], b"x" + there.read_bytes()[1:]):
        there.write_bytes(data)
        assert tree.build("-O1") == 42
    assert tree.compiled() == 4


def test_without_a_folder_the_compiler_runs(tree: Tree) -> None:
    tree.cache.write_text("a file where the folder should be")
    assert tree.build("-O1") == 42 and tree.build("-O1") == 42


def test_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_CACHE_DIR", str(tmp_path))
    keys = [object_cache.key_of(str(i)) for i in range(4)]
    for i, key in enumerate(keys):
        object_cache.write(key, random.Random(i).randbytes(1000))  # nothing squeezes them
        os.utime(object_cache.folder() / key[:2] / key, (time.time() - 100 * (4 - i),) * 2)
    object_cache.evict(limit=2500, age=1000)
    assert [object_cache.read(key) is not None for key in keys] == [False, False, True, True]
    os.utime(object_cache.folder() / keys[2][:2] / keys[2], (time.time() - 2000,) * 2)
    object_cache.evict(limit=2500, age=1000)
    assert [object_cache.read(key) is not None for key in keys] == [False, False, False, True]
    assert object_cache.read(keys[3]) == random.Random(3).randbytes(1000)
    object_cache.write(keys[0], bytes(100_000))
    assert (object_cache.folder() / keys[0][:2] / keys[0]).stat().st_size < 1000
    assert object_cache.read(keys[0]) == bytes(100_000)
