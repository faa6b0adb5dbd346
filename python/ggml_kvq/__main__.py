"""`python -m ggml_kvq`: the environment, for bug reports."""

from __future__ import annotations

import os
import platform
import sys

from . import __version__


def cpu_features() -> str:
    """Model name and the instruction sets that matter here, from /proc/cpuinfo."""
    wanted = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "asimd", "asimddp", "asimdhp")
    name, flags = platform.machine(), set()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
            for line in f:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    name = value.strip()
                elif key.strip() in ("flags", "Features"):
                    flags = set(value.split())
                    break
    except OSError:
        pass
    return f"{name} ({' '.join(w for w in wanted if w in flags) or 'no known instruction set'})"


def main() -> int:
    from .core import loader

    lines = [
        f"ggml-kvq     {__version__}",
        f"system       {platform.platform()}",
        f"cpu          {cpu_features()}",
        *loader.diagnose(),
    ]
    try:
        print("\n".join(lines), flush=True)
    except OSError as e:  # a full disk, a closed pipe
        print(f"ggml_kvq: error: the output could not be written: {e.strerror}", file=sys.stderr)
        os._exit(2)  # Python would try again, and trace
    return int(any("NOT USABLE" in line or "NOT LOADED" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
