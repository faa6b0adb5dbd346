#!/usr/bin/env python3
"""A wheel of one library: ggml_kvq_cu13 with libggml-kvq.so and a module that tells where it lies.

    python scripts/addon_wheel.py build/lib/libggml-kvq.so 0.1.0 OUT

scripts/build_wheels.sh calls it and gives the result to scripts/repair_wheel.py, which writes tag and RECORD.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

MODULE = '''"""libggml-kvq.so with CUDA kernels, for a llama.cpp with CUDA. `python -m ggml_kvq_cu13` says where."""

from pathlib import Path


def library() -> Path:
    """Path of libggml-kvq.so."""
    return Path(__file__).resolve().parent / "lib" / "libggml-kvq.so"
'''


def main() -> int:
    if len(sys.argv) != 4:
        print("usage: addon_wheel.py LIBRARY VERSION OUT", file=sys.stderr)
        return 2
    library, version, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    root = Path(__file__).resolve().parent.parent
    info = f"ggml_kvq_cu13-{version}.dist-info"
    metadata = (
        f"Metadata-Version: 2.4\nName: ggml-kvq-cu13\nVersion: {version}\n"
        "Summary: CUDA kernels of ggml-kvq for a llama.cpp that was built with CUDA\n"
        "License-Expression: MIT\nLicense-File: LICENSE\n"
        f"Requires-Python: >=3.10\nRequires-Dist: ggml-kvq=={version}\n\n"
        "libggml-kvq.so with CUDA kernels, nothing else: weights and everything but the KV cache are computed by\n"
        "upstream's libggml-cuda.so, which comes with a llama.cpp of yours.\n"
    )
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"ggml_kvq_cu13-{version}-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as z:
        z.write(library, "ggml_kvq_cu13/lib/libggml-kvq.so")
        z.writestr("ggml_kvq_cu13/__init__.py", MODULE)
        z.writestr("ggml_kvq_cu13/__main__.py", "from . import library\n\nprint(library())\n")
        z.write(root / "LICENSE", f"{info}/licenses/LICENSE")
        z.writestr(f"{info}/METADATA", metadata)
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: addon_wheel.py\n")
        z.writestr(f"{info}/RECORD", "")
    print(target)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
