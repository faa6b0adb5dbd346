"""What goes with what when a model is opened: method, options, calibrated data, cache types, devices."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import MethodError, ModelError
from . import llama
from .kvstats import UPSTREAM
from .loader import Libraries


def check_method(method: str | None, options: str, config: str, type_k: str, type_v: str) -> None:
    """MethodError unless method, options, calibrated data ("": none) and upstream's cache types go together."""
    if method in (None, UPSTREAM):
        if options:
            raise MethodError(f"kv_opts={options!r} without a method; pass kv_method as well")
        if config and method == UPSTREAM:
            raise MethodError("kv_config goes with a kvq method; drop it or choose a kv_method")
        return
    if not {type_k, type_v} <= set(llama.DECLARED):
        raise MethodError(
            f"type_k={type_k} type_v={type_v} cannot be declared with kv_method={method}; choose from"
            f" {', '.join(llama.DECLARED)}, or drop them"
        )


def devices(libs: Libraries, method: str | None, device: str | Sequence[str] | None) -> tuple[list[str], list[int]]:
    """Descriptions and handles of the devices to use; device: name or names, None: what suits the method.

    Raises ModelError for a device that does not exist or cannot hold the cache.
    """
    known = libs.devices()
    if device is not None:
        names = [device] if isinstance(device, str) else list(device)
    elif method in (None, UPSTREAM):
        gpu = (llama.DEVICE_TYPE_GPU, llama.DEVICE_TYPE_IGPU)
        names = [n for n, kind, _ in known if kind in gpu and not n.startswith("KVQ")]
    else:
        names = ["KVQ0"]
    handles = {n: h for n, _, h in known}
    for name in names:
        if name not in handles:
            raise ModelError(f"device {name} does not exist; choose from {', '.join(handles)}")
        if name.startswith("KVQ") and method in (None, UPSTREAM):
            raise ModelError(f"device {name} needs a kv_method; pass kv_method or another device")
        if not name.startswith("KVQ") and method not in (None, UPSTREAM):
            raise ModelError(f"device {name} cannot hold the cache of kv_method={method}; choose KVQ0")
    described = [libs.describe(n, handles[n]) for n in names] or ["CPU"]
    return described, [handles[n] for n in names]
