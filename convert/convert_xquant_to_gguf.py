#!/usr/bin/env python3
"""Write an XQuant configuration as a sidecar GGUF: the preset, or with -f TEXT a search; `ggml-kvq calibrate
--method xquant`.
"""

import sys

from ggml_kvq.cli import main

if __name__ == "__main__":
    sys.exit(main(["calibrate", "--method", "xquant", *sys.argv[1:]]))
