"""The table of block formats, as types/types.h."""

from __future__ import annotations

from . import affine, f16, lattice
from .codec import AFFINE, F16, LATTICE

#: kvq_type -> module with nbytes, encode, decode, exact, match
TYPES = {F16: f16, AFFINE: affine, LATTICE: lattice}
