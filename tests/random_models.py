"""GGUF files of random weights, for tests that need a shape and no sense."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

Shapes = dict[str, tuple[int, ...]]  # by name without ".weight"; as numpy counts, the output first


def copy_tokenizer(writer: gguf.GGUFWriter, model: Path) -> None:
    for key, f in gguf.GGUFReader(model).fields.items():
        if key.startswith("tokenizer.ggml."):
            inner = f.types[-1] if f.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, f.contents(), f.types[0], sub_type=inner)


def write(writer: gguf.GGUFWriter, shapes: Shapes, layer: Shapes, n_layer: int, scale: float) -> None:
    """The file, closed. Vectors are ones, matrices normal with deviation `scale`; layer: of each of n_layer."""
    rng = np.random.default_rng(0)
    for name, shape in {**shapes, **{f"blk.{il}.{k}": v for il in range(n_layer) for k, v in layer.items()}}.items():
        x = np.ones(shape) if len(shape) == 1 else rng.standard_normal(shape) * scale
        writer.add_tensor(f"{name}.weight", x.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
