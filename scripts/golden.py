#!/usr/bin/env python3
"""What a refactoring must not change, as hashes: blocks of every format, saved states, logits and texts of every
method.

    scripts/golden.py write before.json     on the commit before
    scripts/golden.py check before.json     after; exit code 1 and one line for each value that differs

Logits and texts hold on one machine alone: other kernels (ISA, GPU) round otherwise. Options behind it: --config
SIDECAR (aqua with its data), --threads N.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from ggml_kvq import Model
from ggml_kvq.core import kernels, loader
from ggml_kvq.errors import MethodError
from ggml_kvq.reference import AFFINE, LATTICE, MIXED, Codec, K, V

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "models" / "kvq-demo-q8_0.gguf"
TEXT = "The register file holds sixteen words. Each word is read by the decoder before the next cycle begins. " * 60

#: method and options of every kind of cache that a method can make
ARMS = [
    ("f16", ""),
    *(("kivi", o) for o in ("", "bits=1", "bits=3", "bits=4", "group=64,scales=u8", "group=128,group_v=32,sinks=4")),
    *(("kivi", o) for o in ("k_bits=2,v_bits=4,window=0", "levels=mid,eta=0.1", "precision=f32")),
    *(("xquant", o) for o in ("", "preset=1.16", "kq=2,vq=6,km=2,vm=0,shared=none")),
    *(("higgs", o) for o in ("", "bits=1,grid=d8", "bits=3,sinks=4", "bits=4", "scales=f16,grid=d4", "precision=f32")),
    *(("aqua", f"predictor={o}") for o in ("none", "bias", "k", "full,weights=8", "full,weights=4")),
    *(
        ("zipcache", o)
        for o in ("", "keep=0.5", "hi=3,lo=1,interval=64,salient=0.3", "normalise=false,probe=1,scales=u8")
    ),
    *(("minikv", o) for o in ("", "bits=4", "budget=pyramid", "hh=0.5,rw=0.1,window=64")),
]


def digest(*parts: Any) -> str:
    h = hashlib.sha256()
    for x in parts:
        h.update(x if isinstance(x, bytes) else np.ascontiguousarray(x).tobytes())
    return h.hexdigest()[:24]


def codecs() -> Iterator[Codec]:
    for role, bits, scale, head in itertools.product((K, V), range(5), (0, 1, 2), (64, 80, 96, 128, 256)):
        for group, n_cells in ((32, 32), (32, 64), (64, 64), (128, 128)):
            if role == K or (group <= head and n_cells != 64):
                yield Codec(AFFINE, role, bits, group, scale, bits & 1, (0.0, 0.045)[head % 3 == 0], n_cells, head)
    for (d, bits), role, scale, head in itertools.product(
        ((2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (2, 3), (2, 4)), (K, V), (0, 1), (64, 72, 80, 128, 256)
    ):
        yield Codec(LATTICE, role, bits, d, scale, 0, 0.0, 64 if head == 72 else 32, head)
    for role, (lo, hi), head in itertools.product((K, V), ((2, 4), (0, 2), (1, 2), (2, 3)), (64, 96, 128)):
        yield Codec(MIXED, role, lo, 160 if role == K else head, 1, 0, 0.0, 160, head, hi, 64)


def blocks() -> dict[str, str]:
    """One hash a codec: codes and parameters of random rows, and the rows read back."""
    lib, out = loader.libraries().need_kvq(), {}
    for c in codecs():
        rng = np.random.default_rng(zlib.crc32(repr(c).encode()))
        rows = (rng.normal(size=(c.n_cells, c.head_size)) * np.exp(rng.normal(size=c.head_size))).astype(np.float16)
        valid = rng.integers(0, 256, c.n_cells // 8, np.uint8)
        for name, mask in (("all", None), ("some", valid)):
            try:
                codes, params = kernels.encode(lib, c, rows, mask)
            except MethodError as e:
                out[f"block {c} {name}"] = str(e)
                continue
            out[f"block {c} {name}"] = digest(codes, params, kernels.decode(lib, c, codes, params))
    return out


def run(method: str, opts: str, config: str | None, threads: int, n_ubatch: int, folder: Path) -> dict[str, str]:
    """Logits, both forms of a saved state, a text, and what the cache says about itself."""
    out: dict[str, str] = {}
    for form in ("rows", "compact"):
        text = ",".join(x for x in (opts, "" if form == "rows" else f"state={form}") if x)
        name = f"{method} {opts} ubatch={n_ubatch} {form}"
        data = config if method == "aqua" and "none" not in opts else None
        try:
            model = Model(DEMO, method, text, data, n_ctx=2048, n_batch=512, n_ubatch=n_ubatch, n_threads=threads)
        except MethodError as e:
            out[name] = str(e)
            continue
        with model as m:
            ids = m.tokenize(TEXT, add_bos=True)[:1000]
            out[f"{name} load line"] = m.load_line
            out[f"{name} logits"] = digest(*[x.copy() for x in m.feed(ids, outputs=np.ones(len(ids)))])
            m.save_state(folder / "state")
            out[f"{name} state"] = digest((folder / "state").read_bytes())
            stats = m.kv_stats()
            out[f"{name} stats"] = json.dumps(stats, sort_keys=True, default=str)
            m.load_state(folder / "state")
            m.save_state(folder / "again")
            out[f"{name} state again"] = digest((folder / "again").read_bytes())
            m.truncate(900)
            more = [x.copy() for x in m.feed(ids[900:], outputs=np.ones(100), n_ubatch=1)]
            out[f"{name} one by one"] = digest(*more)
            out[f"{name} text"] = "".join(
                m.generate("The register file holds" + TEXT[:3000], max_tokens=48, temperature=0)
            )
    return out


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["write", "check"])
    p.add_argument("file", type=Path)
    p.add_argument("--config", help="sidecar of the demo model with means and predictors")
    p.add_argument("--threads", type=int, default=2)
    a = p.parse_args()
    values = blocks()
    with tempfile.TemporaryDirectory() as folder:
        for (method, opts), n_ubatch in itertools.product(ARMS, (128, 512)):
            if method != "aqua" or "none" in opts or a.config:
                values |= run(method, opts, a.config, a.threads, n_ubatch, Path(folder))
                print(f"{method} {opts} {n_ubatch}", file=sys.stderr)
    if a.what == "write":
        a.file.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
        print(f"{len(values)} values in {a.file}")
        return 0
    want = json.loads(a.file.read_text())
    apart = [k for k in sorted(want.keys() | values.keys()) if want.get(k) != values.get(k)]
    for k in apart:
        print(f"differs: {k}\n    before {want.get(k)}\n    now    {values.get(k)}")
    print(f"{len(want) - len(apart)} of {len(want)} values as before")
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
