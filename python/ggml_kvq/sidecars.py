"""MODEL.kvq.gguf beside MODEL.gguf: where calibrated data is written, so that libggml-kvq finds it unnamed."""

from __future__ import annotations

import os


def default_path(model: str | os.PathLike[str]) -> str:
    """Where `ggml-kvq calibrate` puts the data of a model."""
    return os.path.splitext(os.fspath(model))[0] + ".kvq.gguf"
