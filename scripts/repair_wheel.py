#!/usr/bin/env python3
"""Make a wheel travel: what it needs of a system is checked and written into its name.

    python scripts/repair_wheel.py WHEEL -o DIR [--bundle libgomp.so.1] [--name ggml-kvq-cu13] [--requires SPEC ...]

- Every ELF file may need the C library, libstdc++ and libgcc_s of the system, files of its own folder, and nothing
  else (--external names more). Libraries named by --bundle are copied into the folder, with their licence.
- The newest symbol versions (GLIBC_2.x, GLIBCXX_3.4.x, CXXABI, GCC) decide the platform tag, manylinux_2_x, as PEP 600
  wants it: a glibc of that version has them, and the libstdc++ of a distribution with that glibc has the others.
- RECORD and WHEEL are written anew. Standard library and binutils' readelf only; auditwheel, where it is installed, is
  asked for its opinion by scripts/build_wheels.sh.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SYSTEM = {
    "libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "libstdc++.so.6", "libgcc_s.so.1",
    "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1",
}  # fmt: skip
#: newest versions of the other libraries in the first release of a distribution with that glibc (PEP 600 by example:
#: Debian 10, 11, Ubuntu 22.04, Debian 12, Ubuntu 24.04)
WITH_GLIBC = {
    (2, 28): {"GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (8, 0, 0)},
    (2, 31): {"GLIBCXX": (3, 4, 28), "CXXABI": (1, 3, 12), "GCC": (10, 0, 0)},
    (2, 35): {"GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12, 0, 0)},
    (2, 36): {"GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12, 0, 0)},
    (2, 39): {"GLIBCXX": (3, 4, 33), "CXXABI": (1, 3, 15), "GCC": (14, 0, 0)},
}


#: its licence, SPDX
LIBGOMP = "GPL-3.0-or-later WITH GCC-exception-3.1"


def readelf(*argv: str) -> str:
    return subprocess.run(["readelf", "-W", *argv], capture_output=True, text=True, check=True).stdout


def elf_files(folder: Path) -> list[Path]:
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb") as f:
                if f.read(4) == b"\x7fELF":
                    found.append(path)
    return found


def needs(path: Path) -> tuple[list[str], str]:
    """Libraries that a file names, and where it looks for them."""
    text = readelf("-d", str(path))
    run = re.search(r"\((?:RUNPATH|RPATH)\)\s+Library (?:runpath|rpath): \[(.*)\]", text)
    return re.findall(r"\(NEEDED\)\s+Shared library: \[(.*)\]", text), run[1] if run else ""


def versions(path: Path) -> dict[str, tuple[int, ...]]:
    """Newest version of each kind (GLIBC, GLIBCXX, ...) that a file asks for."""
    newest: dict[str, tuple[int, ...]] = {}
    wanted = readelf("-V", str(path)).split("Version needs section", 1)
    for kind, number in re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)", wanted[1] if wanted[1:] else ""):
        newest[kind] = max(newest.get(kind, ()), tuple(int(x) for x in number.split(".")))
    return newest


def bundle(library: str, folder: Path, machine: str) -> Path:
    """Copy a library of this machine (or of a cross-compiler) beside the others, with its licence."""
    compiler = {"x86_64": "gcc", "aarch64": "aarch64-linux-gnu-gcc"}[machine]
    found = subprocess.run([compiler, f"-print-file-name={library}"], capture_output=True, text=True, check=True)
    source = Path(found.stdout.strip())
    if not source.is_absolute():
        raise SystemExit(f"repair_wheel: {compiler} knows no {library}; install it")
    target = folder / library
    shutil.copy(source.resolve(), target)
    licence = Path(f"/usr/share/doc/{source.resolve().name.split('.')[0]}1/copyright")
    texts = [licence, Path("/usr/share/common-licenses/GPL-3")]  # the first one refers to the second
    for text in texts:
        if not text.exists():
            raise SystemExit(f"repair_wheel: no {text}; a wheel with {library} needs its licence: build on Debian")
    with open(folder / f"LICENSE.{library.split('.')[0]}", "wb") as f:
        f.write(b"\n\n".join(text.read_bytes() for text in texts))
    return target


def check(root: Path, external: set[str]) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """(newest versions of all files, what is wrong)."""
    newest: dict[str, tuple[int, ...]] = {}
    wrong = []
    for path in elf_files(root):
        libraries, where = needs(path)
        for name in libraries:
            if name in SYSTEM or name in external:
                continue
            if not (path.parent / name).exists():
                wrong.append(f"{path.relative_to(root)} needs {name}, which is not in the wheel")
            elif "$ORIGIN" not in where.split(":"):
                wrong.append(f"{path.relative_to(root)} needs {name} and does not look beside itself ({where!r})")
        for kind, version in versions(path).items():
            newest[kind] = max(newest.get(kind, ()), version)
    return newest, wrong


def tag(newest: dict[str, tuple[int, ...]], machine: str) -> str:
    """Platform tag: the oldest release whose libraries have all versions."""
    glibc = newest.get("GLIBC", (2, 17))
    for version, others in sorted(WITH_GLIBC.items()):
        fits = all(newest.get(kind, (0,)) <= most for kind, most in others.items())
        if version >= glibc[:2] and fits:
            return f"manylinux_{version[0]}_{version[1]}_{machine}"
    raise SystemExit(f"repair_wheel: {newest} is newer than every release that is known here (WITH_GLIBC)")


def digest(path: Path) -> str:
    raw = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
    return f"sha256={raw},{path.stat().st_size}"


def pack(root: Path, info: Path, out: Path, name: str, platform: str) -> Path:
    """Write WHEEL, RECORD and the archive; files keep their modes, times are those of the first ZIP."""
    about = info / "WHEEL"
    lines = [x for x in about.read_text().splitlines() if not x.startswith(("Tag:", "Root-Is-Purelib:")) and x]
    about.write_text("\n".join([*lines, "Root-Is-Purelib: false", f"Tag: py3-none-{platform}"]) + "\n")
    record = info / "RECORD"
    files = [p for p in sorted(root.rglob("*")) if p.is_file() and p != record]
    rows = [f"{p.relative_to(root)},{digest(p)}" for p in files]
    record.write_text("\n".join([*rows, f"{record.relative_to(root)},,"]) + "\n")
    target = out / f"{info.name.removesuffix('.dist-info')}-py3-none-{platform}.whl"
    partial = target.with_name(target.name + ".partial")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as z:
            for p in [*files, record]:
                entry = zipfile.ZipInfo(str(p.relative_to(root)), (1980, 1, 1, 0, 0, 0))
                entry.external_attr = (p.stat().st_mode & 0o777 | 0o100000) << 16
                entry.compress_type = zipfile.ZIP_DEFLATED
                z.writestr(entry, p.read_bytes())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def rename(root: Path, info: Path, name: str) -> Path:
    """Another name of the distribution; what is imported keeps its own."""
    metadata = info / "METADATA"
    metadata.write_text(re.sub(r"^Name: .*$", f"Name: {name}", metadata.read_text(), count=1, flags=re.M))
    version = info.name.removesuffix(".dist-info").rsplit("-", 1)[1]
    return info.rename(root / f"{name.replace('-', '_')}-{version}.dist-info")


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("wheel", type=Path)
    p.add_argument("-o", "--out", type=Path, default=Path("dist"))
    p.add_argument("--bundle", action="append", default=[], metavar="LIBRARY")
    p.add_argument("--external", action="append", default=[], metavar="LIBRARY", help="comes from elsewhere")
    p.add_argument("--name", help="name of the distribution")
    p.add_argument("--requires", action="append", default=[], metavar="SPEC")
    a = p.parse_args()
    machine = "aarch64" if "aarch64" in a.wheel.name else "x86_64"
    with tempfile.TemporaryDirectory() as work:
        root = Path(work)
        with zipfile.ZipFile(a.wheel) as z:
            for entry in z.infolist():
                z.extract(entry, root)
                if not entry.is_dir():
                    (root / entry.filename).chmod(entry.external_attr >> 16 & 0o777 or 0o644)
        infos = list(root.glob("*.dist-info"))
        if len(infos) != 1:
            raise SystemExit(f"repair_wheel: {a.wheel} holds {len(infos)} dist-info folders; a wheel has one")
        info = infos[0]
        libraries = sorted({p.parent for p in elf_files(root)})
        for library in a.bundle:
            for folder in libraries:
                bundle(library, folder, machine)
        if "libgomp.so.1" in a.bundle:
            metadata = info / "METADATA"
            text = metadata.read_text()
            metadata.write_text(re.sub(r"^(License-Expression: .*)$", rf"\1 AND {LIBGOMP}", text, count=1, flags=re.M))
        if a.name:
            info = rename(root, info, a.name)
        metadata = info / "METADATA"
        head, _, body = metadata.read_text().partition("\n\n")
        metadata.write_text("\n".join([head, *(f"Requires-Dist: {x}" for x in a.requires)]) + "\n\n" + body)
        newest, wrong = check(root, set(a.external))
        if wrong:
            print("repair_wheel: " + "\nrepair_wheel: ".join(wrong), file=sys.stderr)
            return 1
        a.out.mkdir(parents=True, exist_ok=True)
        made = pack(root, info, a.out, a.name or "", tag(newest, machine))
    said = ", ".join(f"{k} {'.'.join(map(str, v))}" for k, v in sorted(newest.items()))
    print(f"{made}: {made.stat().st_size / 1e6:.1f} MB, newest symbols {said}")
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except (OSError, zipfile.BadZipFile) as e:
        raise SystemExit(f"repair_wheel: {' '.join(sys.argv[1:])}: {e}") from None
    except subprocess.CalledProcessError as e:
        raise SystemExit(f"repair_wheel: {' '.join(map(str, e.cmd))} failed: {e.stderr.strip()}") from None
