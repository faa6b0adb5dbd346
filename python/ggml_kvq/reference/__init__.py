"""The numpy definition of every block format and method of ggml-kvq. Needs numpy only; the native library is tested against it."""

from . import affine, f16
from .codec import AFFINE, F16, Codec, K, V
from .method import METHODS, LanePlan, LayerPlan, LayerShape, Method

#: kvq_type -> module with nbytes, encode, decode, exact, match
TYPES = {F16: f16, AFFINE: affine}

# one import line per method, in the order of ggml-kvq/methods.inc
from . import kivi  # noqa: E402,F401
from . import xquant  # noqa: E402,F401
from . import attention, image  # noqa: E402,F401


def nbytes(codec: Codec) -> tuple[int, int]:
    """(nb_codes, nb_params) of a block."""
    return TYPES[codec.type].nbytes(codec)


def encode(codec: Codec, rows, valid=None, shared=None):
    """f16 [n_cells, head_size] -> (codes, params), uint8 arrays; see affine.encode."""
    return TYPES[codec.type].encode(codec, rows, valid, shared)


def decode(codec: Codec, codes, params):
    """-> f16 [n_cells, head_size]."""
    return TYPES[codec.type].decode(codec, codes, params)


__all__ = [
    "AFFINE",
    "F16",
    "METHODS",
    "TYPES",
    "Codec",
    "K",
    "LanePlan",
    "LayerPlan",
    "LayerShape",
    "Method",
    "V",
    "attention",
    "decode",
    "encode",
    "image",
    "nbytes",
]
