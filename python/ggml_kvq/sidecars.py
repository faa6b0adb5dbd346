"""MODEL.kvq.gguf beside MODEL.gguf: calibrated data that is found without being named."""

from __future__ import annotations

import os

from . import gguf_header


def default_path(model: str | os.PathLike[str]) -> str:
    """Where `ggml-kvq calibrate` puts the data of a model."""
    return os.path.splitext(os.fspath(model))[0] + ".kvq.gguf"


def beside(model: str | os.PathLike[str], method: str) -> str | None:
    """The sidecar beside the model when it is of `method` and the model itself holds no data of that method."""
    there = default_path(model)
    if not os.path.isfile(there) or gguf_header.read(there).fields.get("kvq.method") != method:
        return None
    own = gguf_header.read(model).kvq()
    return None if own.get("kvq.method") == method and "kvq.version" in own else there
