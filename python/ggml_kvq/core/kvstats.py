"""Accounting of KV caches: which native cache belongs to which context, and the size of upstream's own caches."""

from __future__ import annotations

import ctypes
import re
import threading
from typing import Any

from . import llama, native
from .loader import Libraries

#: kv_method value that keeps upstream's own cache even when the model's metadata name a method.
UPSTREAM = "upstream"

#: Counts that are summed over the caches of a context.
SUMS = ("n_sealed", "n_reopened", "n_forced", "n_layer", "n_fetched", "n_wanted", "n_hits", "n_steps")

# libggml-kvq numbers live caches in creation order over the whole process: contexts are created and freed under this
# lock, and _owners holds (owner, number of its caches) in the same order.
lock = threading.RLock()
_owners: list[tuple[int, int]] = []


def option(text: str, key: str) -> str:
    """Value of `key` in "key=value,key=value", "" when it is not there."""
    pairs = dict(item.split("=", 1) for item in text.split(",") if "=" in item)
    return next((v.strip() for k, v in pairs.items() if k.strip() == key), "")


def bytes_besides(stats: dict[str, Any]) -> int:
    """Bytes of a second tier that lie in another memory than the rest, so that bytes_total lacks them."""
    parts = ("codes", "params", "window", "tables", "calibration", "chain")
    inside = int(stats["bytes_total"]) - sum(int(stats[f"bytes_{p}"]) for p in parts)
    return int(stats["bytes_far"]) - inside


def own(owner: int, n_caches: int) -> None:
    """Note that `owner` just created n_caches caches. Call with the lock held."""
    if n_caches:
        _owners.append((owner, n_caches))


def disown(owner: int) -> None:
    """Forget `owner`, whose caches were just freed. Call with the lock held."""
    _owners[:] = [o for o in _owners if o[0] != owner]


def _numbers(owner: int) -> range:
    """Native numbers of the caches of `owner`. Call with the lock held."""
    first = 0
    for who, n in _owners:
        if who == owner:
            return range(first, first + n)
        first += n
    return range(0)


def load_lines(libs: Libraries, owner: int) -> list[str]:
    """The line about each cache of `owner`: method, true bits, MiB against f16, device, kernels."""
    with lock:
        return [libs.need_kvq().kvq_cache_line(i).decode("utf-8", "replace").strip() for i in _numbers(owner)]


def fetched(kvq: Any, i: int) -> dict[int, dict[str, int]]:
    """Counts of the layers of native cache i that fetch far rows, by layer: n_fetched, n_wanted, n_hits, n_steps."""
    n = kvq.kvq_cache_fetched(i, 0, None, None)
    layers, counts = (ctypes.c_int32 * max(n, 1))(), (ctypes.c_uint64 * max(4 * n, 1))()
    n = min(n, kvq.kvq_cache_fetched(i, n, layers, counts))
    names = ("n_fetched", "n_wanted", "n_hits", "n_steps")
    return {layers[j]: dict(zip(names, counts[4 * j : 4 * j + 4], strict=True)) for j in range(n)}


def stats(libs: Libraries, owner: int) -> dict[str, Any]:
    """kv_stats() of the caches of `owner`: one dict, sums over its caches, bits weighted by size; `caches` lists
    them, each with the counts of its `layers` where these fetch far rows.
    """
    kvq = libs.need_kvq()
    caches = []
    with lock:
        for i in _numbers(owner):
            raw = native.kvq_stats()
            native.check(kvq, kvq.kvq_cache_stats(i, ctypes.byref(raw)))
            caches.append({**native.stats_dict(raw), "layers": fetched(kvq, i)})
    return {**total(caches), "caches": caches}


def total(caches: list[dict[str, Any]]) -> dict[str, Any]:
    """Several caches of one context as one: sums, and bits weighted by size."""
    out = {k: v for k, v in caches[0].items() if k != "layers"}
    for key in out:
        if key.startswith("bytes_") or key in SUMS:
            out[key] = sum(c[key] for c in caches)
    for key in ("bits", "bits_k", "bits_v", "bits_headline"):
        out[key] = sum(c[key] * c["bytes_f16"] for c in caches) / max(1, out["bytes_f16"])
    return out


def type_bits(libs: Libraries, name: str) -> float:
    """Bits per value of an upstream cache type, block scales included."""
    kind = llama.GGML_TYPES[name]
    return float(libs.base.ggml_type_size(kind)) * 8 / float(libs.base.ggml_blck_size(kind))


def upstream_stats(libs: Libraries, type_k: str, type_v: str, log_lines: list[str]) -> dict[str, Any]:
    """kv_stats() of upstream's own cache: bits from ggml's type table, bytes from the size llama.cpp reports at
    load.
    """
    k, v = type_bits(libs, type_k), type_bits(libs, type_v)
    mib = sum(float(m.group(1)) for line in log_lines if (m := re.search(r"size\s*=\s*([\d.]+) MiB", line)))
    total = int(mib * 2**20)
    return {
        "method": UPSTREAM,
        "options": f"{type_k}/{type_v}",
        "bits_k": k,
        "bits_v": v,
        "bits": (k + v) / 2,
        "bytes_total": total,
        "bytes_f16": int(total * 32 / (k + v)),
    }
