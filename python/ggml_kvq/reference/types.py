"""The table of block formats, as types/types.h."""

from __future__ import annotations

from . import affine, f16, lattice, mixed
from .codec import AFFINE, F16, LATTICE, MIXED

#: kvq_type -> module with nbytes, encode, decode, exact, match
TYPES = {F16: f16, AFFINE: affine, LATTICE: lattice, MIXED: mixed}
