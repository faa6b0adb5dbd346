"""The laboratory: an idea for a KV cache as a Python class, run inside unmodified llama.cpp on any GGUF.

    from ggml_kvq import Model
    from ggml_kvq.lab import Decoded, Method, affine

    class Mine(Method):
        bits: int = 2  # an option: lab:mine.py:Mine,bits=3

        def seal(self, page):
            keys, values = affine(page.keys, self.bits, 1), affine(page.values, self.bits, 3)
            return Decoded(keys, values, bits=self.bits + 32 / 32)

    Model("model.gguf", kv_method="lab", lab=Mine(bits=2))

Everything is simulated: the cache holds f16 rows, namely what `seal` gave back, and bits are those that it declares.
docs/laboratory.md is the guide.
"""

from ..errors import LabError
from .maths import affine, f16, gaussian, hadamard, lattice, nearest, ridge, rms, trellis, u8_scales
from .method import Method, load
from .page import Before, Cells, Decoded, LayerSample, Page, Sample

__all__ = [
    "Before",
    "Cells",
    "Decoded",
    "LabError",
    "LayerSample",
    "Method",
    "Page",
    "Sample",
    "affine",
    "f16",
    "gaussian",
    "hadamard",
    "lattice",
    "load",
    "nearest",
    "ridge",
    "rms",
    "trellis",
    "u8_scales",
]
