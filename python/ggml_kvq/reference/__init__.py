"""The numpy definition of every block format and method of ggml-kvq. Needs numpy only; the native library is tested
against it.
"""

import numpy as np

# every file of a method is imported here: importing registers it
from . import affine, attention, f16, image, kivi, lattice, mixed, saliency, xquant

from . import higgs, aqua, zipcache, minikv, specache, auto, lab  # isort: skip  # the order of methods.inc
from .codec import AFFINE, F16, LATTICE, MIXED, Codec, K, V
from .method import METHODS, LanePlan, LayerPlan, LayerShape, Method
from .types import TYPES


def nbytes(codec: Codec) -> tuple[int, int]:
    """(nb_codes, nb_params) of a block."""
    return TYPES[codec.type].nbytes(codec)


def encode(
    codec: Codec, rows: np.ndarray, valid: np.ndarray | None = None, shared: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """f16 [n_cells, head_size] -> (codes, params), uint8 arrays; see affine.encode."""
    return TYPES[codec.type].encode(codec, rows, valid, shared)


def decode(codec: Codec, codes: np.ndarray, params: np.ndarray) -> np.ndarray:
    """-> f16 [n_cells, head_size]."""
    return TYPES[codec.type].decode(codec, codes, params)


__all__ = [
    "AFFINE",
    "F16",
    "LATTICE",
    "METHODS",
    "MIXED",
    "TYPES",
    "Codec",
    "K",
    "LanePlan",
    "LayerPlan",
    "LayerShape",
    "Method",
    "V",
    "affine",
    "aqua",
    "attention",
    "auto",
    "decode",
    "encode",
    "f16",
    "higgs",
    "image",
    "kivi",
    "lab",
    "lattice",
    "minikv",
    "mixed",
    "nbytes",
    "saliency",
    "specache",
    "xquant",
    "zipcache",
]
