#!/usr/bin/env python3
"""Calibrate a model for method aqua and write the data as a sidecar GGUF: `ggml-kvq calibrate` under llama.cpp's
kind of name.
"""

import sys

from ggml_kvq.cli import main

if __name__ == "__main__":
    sys.exit(main(["calibrate", *sys.argv[1:]]))
