"""Compiled objects that outlive a test run: the same text, compiler and flags give the same object.

As a compiler launcher (cmake's CMAKE_CXX_COMPILER_LAUNCHER) or in front of any compile command:

    python object_cache.py --root=TREE g++ -O1 -c file.cpp -o file.o

The key holds the compiler and its version, the flags and the preprocessed text: every header's content is in it, and
what is compiled is that very text, so that no object is ever stale. Paths of the tree and of the build folder do not
count. Objects lie in ~/.cache/ggml-kvq/objects (KVQ_CACHE_DIR), squeezed (to a quarter: a sanitizer's build and
several trees fit), each whole or absent, with its checksum behind it;
the oldest go when they take more than LIMIT. Without a folder to write to, or for a command that is no plain
compilation, the compiler runs as it stands.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

SQUEEZED = b"kvqz1\n"  # in front of what zlib made
LIMIT, AGE = 1 << 30, 30 * 86400  # bytes and seconds that objects are kept
FORMAT = "1"
_WITH_VALUE = ("-I", "-isystem", "-iquote", "-idirafter", "-D", "-U")  # these show in the preprocessed text
_DEPENDENCIES = ("-MF", "-MT", "-MQ")
_OTHERS = ("-include", "-imacros", "@", "-save-temps", "-E", "-S", "-M", "-MM", "-fmodules", "--coverage")


def folder() -> Path:
    """Where the objects lie."""
    base = os.environ.get("KVQ_CACHE_DIR")
    return (Path(base) if base else Path.home() / ".cache" / "ggml-kvq") / "objects"


def launcher(root: Path) -> str:
    """Value of CMAKE_CXX_COMPILER_LAUNCHER for a build of the tree `root`."""
    return f"{sys.executable};{Path(__file__).resolve()};--root={root}"


def read(key: str) -> bytes | None:
    """The object of a key, None when there is none or it is damaged."""
    path = folder() / key[:2] / key
    try:
        data = path.read_bytes()
        os.utime(path)
    except (OSError, RuntimeError):
        return None
    body, digest = data[:-32], data[-32:]
    if hashlib.sha256(body).digest() != digest:
        return None
    return zlib.decompress(body[len(SQUEEZED) :]) if body.startswith(SQUEEZED) else body


def write(key: str, body: bytes) -> None:
    """Keep an object; a full disk or a folder that is not ours is no error."""
    body = SQUEEZED + zlib.compress(body, 1)
    try:
        there = folder() / key[:2]
        there.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=there, prefix=".part-")
        try:
            with open(handle, "wb") as f:
                f.write(body + hashlib.sha256(body).digest())
            os.replace(name, there / key)
        except OSError:
            os.unlink(name)
    except (OSError, RuntimeError):
        pass


def evict(limit: int = LIMIT, age: float = AGE) -> None:
    """Remove what was not used for `age` seconds, then the oldest until `limit` bytes are left. One process at a time;
    who reads an object meanwhile has it open or does without.
    """
    try:
        with open(folder() / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = [(p.stat().st_mtime, p.stat().st_size, p) for p in folder().glob("??/*")]
            found += [(p.stat().st_mtime, p.stat().st_size, p) for p in folder().glob("??/.part-*")]
            total, now = sum(size for _, size, _ in found), time.time()
            for used, size, path in sorted(found):
                if total <= limit and now - used <= age:
                    break
                path.unlink(missing_ok=True)
                total -= size
    except (OSError, RuntimeError):
        pass


def key_of(*parts: str | bytes) -> str:
    """One key of all that decides a result."""
    out = hashlib.sha256()
    for part in (FORMAT, *parts):
        data = part.encode(errors="surrogateescape") if isinstance(part, str) else part
        out.update(len(data).to_bytes(8, "little") + data)
    return out.hexdigest()


def kept(key: str, make: Callable[[], bytes]) -> bytes:
    """The kept bytes of a key, made and kept when there are none."""
    body = read(key)
    if body is None:
        body = make()
        write(key, body)
    return body


def compiler_version(compiler: str) -> str:
    """What names a compiler and its version; for -march=native the CPU belongs to it."""
    done = subprocess.run([compiler, "-v"], capture_output=True, text=True, check=False)
    return f"{os.path.realpath(compiler)}\n{done.stderr}{done.stdout}"


class Command:
    """A compile command taken apart. `plain`: it cannot be kept."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.compiler, self.source, self.out = argv[0], "", ""
        self.dependencies: list[str] = []  # -MD, -MF FILE, ...: the preprocessor writes them
        self.found: list[str] = []  # -I and -D: they show in the text
        self.flags: list[str] = []
        self.plain = "-c" not in argv
        args = iter(argv[1:])
        for arg in args:
            if arg == "-o":
                self.out = next(args, "")
            elif arg == "-c":
                continue
            elif arg in _DEPENDENCIES:
                self.dependencies += [arg, next(args, "")]
            elif arg in ("-MD", "-MMD", "-MP"):
                self.dependencies.append(arg)
            elif arg in _WITH_VALUE:
                self.found += [arg, next(args, "")]
            elif arg.startswith(_WITH_VALUE):
                self.found.append(arg)
            elif arg.startswith(_OTHERS):
                self.plain = True
            elif arg.startswith("-"):
                self.flags.append(arg)
            elif self.source:
                self.plain = True
            else:
                self.source = arg
        self.plain |= not self.source.endswith((".cpp", ".cc", ".cxx")) or not self.out


def compile_kept(argv: Sequence[str], root: str) -> int:
    """Run a compile command or take its object from the folder. Returns the compiler's exit code."""
    command = Command(argv)
    if command.plain:
        return subprocess.run(argv, check=False).returncode
    here = os.getcwd()
    maps = [f"-ffile-prefix-map={here}=."] + ([f"-ffile-prefix-map={root}=."] if root else [])
    with tempfile.TemporaryDirectory() as tmp:
        text = Path(tmp) / "text.ii"
        ask = [command.compiler, *command.flags, *command.found, *maps, *command.dependencies]
        done = subprocess.run([*ask, "-E", command.source, "-o", str(text)], capture_output=True, check=False)
        if done.returncode or done.stderr:
            return subprocess.run(argv, check=False).returncode  # the compiler's own words
        content = text.read_bytes()
        for path, name in sorted(((root, b"/root"), (here, b"/here")), key=lambda x: -len(x[0])):
            content = content.replace(os.fsencode(path), name) if path else content
        cpu = platform.processor() + _cpu() if any("native" in f for f in command.flags) else ""
        key = key_of("object", compiler_version(command.compiler), cpu, json.dumps(command.flags), content)
        body = read(key)
        if body is None:
            made = Path(tmp) / "made.o"
            build = [command.compiler, *command.flags, *maps, "-x", "c++-cpp-output", "-c", str(text), "-o", str(made)]
            done = subprocess.run(build, capture_output=True, check=False)
            if done.returncode or done.stderr:  # errors and warnings: as they stand, each time
                return subprocess.run(argv, check=False).returncode
            body = made.read_bytes()
            write(key, body)
        Path(command.out).write_bytes(body)
    return 0


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return str(time.time())  # not known: no object is kept for another run
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def main(argv: Sequence[str]) -> int:
    root = ""
    if argv and argv[0].startswith("--root="):
        root, argv = argv[0].partition("=")[2], argv[1:]
    return compile_kept(argv, root)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
