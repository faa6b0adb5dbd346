#!/usr/bin/env python3
"""What a wheel contains and under which licences, as a CycloneDX bill of materials (JSON) and as a list for people.

    python scripts/make_sbom.py WHEEL -o sbom.json [--licences licences.md]         needs cyclonedx-python-lib

The parts that are compiled in are known here (PARTS), each with the file of the pinned llama.cpp that it comes from:
a part whose file is gone, or a header folder in vendor/ that nobody named, is an error. What the wheel wants from the
package index is read from its metadata.
"""

from __future__ import annotations

import argparse
import email.parser
import hashlib
import importlib.util
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.contact import OrganizationalEntity
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Part:
    """Somebody else's work in the wheel: name, licence (SPDX), where it stands in llama.cpp's tree, which files of the
    wheel hold it, a pattern that finds its version in that file.
    """

    name: str
    licence: str
    path: str
    inside: str
    version: str = ""


PARTS = (
    Part(
        "cpp-httplib",
        "MIT",
        "vendor/cpp-httplib/httplib.h",
        "llama-server, libllama-common",
        r'CPPHTTPLIB_VERSION "([\d.]+)"',
    ),
    Part("nlohmann-json", "MIT", "vendor/nlohmann/json.hpp", "llama-server, libllama-common", r"version ([\d.]+)"),
    Part("miniaudio", "MIT-0 OR Unlicense", "vendor/miniaudio/miniaudio.h", "libmtmd", r"v(\d+\.\d+\.\d+)"),
    Part("stb_image", "MIT OR Unlicense", "vendor/stb/stb_image.h", "libmtmd", r"stb_image - v([\d.]+)"),
    Part("subprocess.h", "Unlicense", "vendor/sheredom/subprocess.h", "libmtmd, llama-server"),
    Part("xxHash", "BSD-2-Clause", "vendor/hash/xxhash/xxhash.h", "libmtmd"),
    Part("rotate-bits", "MIT", "vendor/hash/rotate-bits/rotate-bits.h", "libmtmd"),
    Part("sha1 by Steve Reid", "LicenseRef-Public-Domain", "vendor/hash/sha1/sha1.h", "libmtmd"),
    Part("sha256 by Igor Pavlov", "LicenseRef-Public-Domain", "vendor/hash/sha256/sha256.h", "libmtmd"),
    Part("YaRN", "MIT", "ggml/src/ggml-cpu/ops.cpp", "libggml-cpu-*"),
    Part("llamafile sgemm", "MIT", "ggml/src/ggml-cpu/llamafile/sgemm.cpp", "libggml-cpu-*"),
)
VENDORED = {"cpp-httplib", "hash", "miniaudio", "nlohmann", "sheredom", "stb"}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def fetched() -> Path:
    """The pinned tree, from the cache or the package index."""
    script = [sys.executable, str(ROOT / "scripts" / "fetch_llama_cpp.py")]
    return Path(subprocess.run(script, capture_output=True, text=True, check=True).stdout.strip())


def licence(text: str) -> LicenseExpression | DisjunctiveLicense:
    plain = " " not in text and not text.startswith("LicenseRef-")
    return DisjunctiveLicense(id=text) if plain else LicenseExpression(text)


def parts(tree: Path) -> list[Component]:
    """Components of llama.cpp's tree. SystemExit when the tree and PARTS disagree."""
    there = {p.name for p in (tree / "vendor").iterdir() if p.is_dir()}
    if there != VENDORED:
        raise SystemExit(f"make_sbom: vendor/ has {sorted(there ^ VENDORED)} more or less than is known: mend PARTS")
    out = []
    for part in PARTS:
        path = tree / part.path
        if not path.exists():
            raise SystemExit(f"make_sbom: no {part.path} in {tree}: mend PARTS")
        found = re.search(part.version, path.read_text(errors="replace")) if part.version else None
        out.append(
            Component(
                name=part.name,
                version=found[1] if found else None,
                type=ComponentType.LIBRARY,
                licenses=[licence(part.licence)],
                description=f"in {part.inside}; {part.path} of llama.cpp",
                bom_ref=part.name,
            )
        )
    return out


def bill(wheel: Path, tree: Path) -> tuple[Bom, list[tuple[str, str, str]]]:
    """(bill of materials, rows of name, licence and where it is)."""
    fetch = load("fetch_llama_cpp")
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
        [metadata] = [n for n in names if n.endswith(".dist-info/METADATA")]
        about = email.parser.Parser().parsestr(z.read(metadata).decode())
    bom = Bom()
    main = Component(
        name=about["Name"],
        version=about["Version"],
        type=ComponentType.LIBRARY,
        licenses=[DisjunctiveLicense(id="MIT")],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=hashlib.sha256(wheel.read_bytes()).hexdigest())],
        supplier=OrganizationalEntity(name="The ggml-kvq authors"),
        purl=PackageURL("pypi", None, about["Name"], about["Version"]),
        bom_ref="ggml-kvq",
    )
    bom.metadata.component = main
    found: list[Component] = []
    if any("/libllama" in n for n in names):
        llama = Component(
            name="llama.cpp",
            version=fetch.COMMIT,
            type=ComponentType.LIBRARY,
            licenses=[DisjunctiveLicense(id="MIT")],
            description="programs and libraries, built unmodified; lib/LICENSE.llama.cpp",
            external_references=[
                ExternalReference(
                    type=ExternalReferenceType.DISTRIBUTION,
                    url=XsUri(f"pkg:pypi/{fetch.PROJECT}@{fetch.VERSION}"),
                    comment=f"{fetch.ARCHIVE}, whose vendor/llama.cpp is that commit",
                    hashes=[HashType(alg=HashAlgorithm.SHA_256, content=fetch.SHA256)],
                )
            ],
            purl=PackageURL("github", "ggml-org", "llama.cpp", fetch.COMMIT),
            bom_ref="llama.cpp",
        )
        found += [llama, *parts(tree)]
    if any(n.endswith("/libgomp.so.1") for n in names):
        found.append(
            Component(
                name="libgomp",
                type=ComponentType.LIBRARY,
                licenses=[LicenseExpression("GPL-3.0-or-later WITH GCC-exception-3.1")],
                description="GCC's OpenMP library, as the building machine has it; lib/LICENSE.libgomp",
                bom_ref="libgomp",
            )
        )
    wanted = [x for x in about.get_all("Requires-Dist", []) if "extra ==" not in x]
    for spec in wanted:
        name = re.match(r"[\w.-]+", spec)
        assert name
        found.append(
            Component(
                name=name[0],
                type=ComponentType.LIBRARY,
                description=f"not in the wheel; installed from the package index: {spec}",
                purl=PackageURL("pypi", None, name[0]),
                bom_ref=f"pypi:{name[0]}",
            )
        )
    for component in found:
        bom.components.add(component)
    bom.register_dependency(main, found)
    rows = [(c.name, "; ".join(str(x.value if isinstance(x, LicenseExpression) else x.id) for x in c.licenses) or
             "its own", c.description or "") for c in [main, *found]]  # fmt: skip
    return bom, rows


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("wheel", type=Path)
    p.add_argument("-o", "--out", type=Path, required=True)
    p.add_argument("--licences", type=Path)
    p.add_argument("--source", type=Path, help="llama.cpp's tree; default: the pinned one")
    a = p.parse_args()
    tree = a.source or fetched()
    bom, rows = bill(a.wheel, tree)
    a.out.write_text(JsonV1Dot6(bom).output_as_string(indent=2), encoding="utf-8")
    if a.licences:
        lines = ["| part | licence | |", "|---|---|---|", *(f"| {n} | {lic} | {what} |" for n, lic, what in rows)]
        a.licences.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{a.out}: {len(rows) - 1} parts of {a.wheel.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
