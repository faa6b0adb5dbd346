"""MODEL.kvq.gguf beside MODEL.gguf: calibrated data that is found without being named."""

from __future__ import annotations

import os

from . import gguf_header


def default_path(model: str | os.PathLike[str]) -> str:
    """Where `ggml-kvq calibrate` puts the data of a model."""
    return os.path.splitext(os.fspath(model))[0] + ".kvq.gguf"


#: Methods whose data are channel means: a file of one serves the others.
_MEANS = {"aqua", "auto", "specache"}


def serves(held: object, method: str) -> bool:
    """Is calibrated data of method `held` what `method` takes?"""
    return held == method or (held in _MEANS and method in _MEANS)


def beside(model: str | os.PathLike[str], method: str) -> str | None:
    """The sidecar beside the model when it is of `method` and the model itself holds no data of that method."""
    there = default_path(model)
    if not os.path.isfile(there) or not serves(gguf_header.read(there).fields.get("kvq.method"), method):
        return None
    return None if holds(model, method) else there


def holds(model: str | os.PathLike[str], method: str) -> bool:
    """The model file itself has calibrated data for `method`."""
    own = gguf_header.read(model).kvq()
    return "kvq.version" in own and serves(own.get("kvq.method"), method)
