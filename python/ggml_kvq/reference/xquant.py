"""XQuant (Yang et al. 2025, cross-layer): calibrated affine blocks whose codes layer pairs share.

Keys of layers below kq and values of layers below vq take 2 bits, all others 1; an odd layer at or above km (vm)
adopts the codes of the layer before it and keeps its own scale and zero (section 3.3). eta1, eta2 calibrate 1- and
2-bit blocks (section 3.2).
"""

from __future__ import annotations

from typing import Any, ClassVar

from .codec import V
from .kivi import AffineMethod
from .method import AFFINE_OPTIONS, LayerShape, register

PRESETS = {  # of 32 layers
    "1.38": {"kq": 30, "vq": 2, "km": 32, "vm": 16},
    "1.41": {"kq": 28, "vq": 0, "km": 32, "vm": 28},
    "1.16": {"kq": 26, "vq": 0, "km": 32, "vm": 0},
}


def equivalent_bits(n_layer: int, kq: int, vq: int, km: int, vm: int) -> float:
    """Code bits per value of a stack (appendix C, corrected):

    B_x = [2 min(q, m) + |q - m| + (L - max(q, m)) / 2] / L,  B = (B_k + B_v) / 2
    """

    def lane(q: int, m: int) -> float:
        return (2 * min(q, m) + abs(q - m) + (n_layer - max(q, m)) / 2) / n_layer

    return (lane(kq, km) + lane(vq, vm)) / 2


def splits(preset: str, n_layer: int) -> dict[str, int]:
    """A preset at another depth: scaled counts made even, keys rounded down and values up, so that pairs stay whole."""
    out = {}
    for key, of32 in PRESETS[preset].items():
        pairs = of32 * n_layer / 64
        pairs = int(pairs) if key[0] == "k" else -int(-pairs // 1)
        out[key] = min(2 * pairs, n_layer + n_layer % 2)
    return out


@register
class XQuant(AffineMethod):
    name = "xquant"
    options: ClassVar[dict[str, Any]] = {
        "preset": "1.38",
        "kq": -1,
        "vq": -1,
        "km": -1,
        "vm": -1,
        "eta1": 0.16666667,
        "eta2": 0.045,
        "shared": "codes",
        **AFFINE_OPTIONS,
    }

    def lane(self, role: int, ordinal: int, n_layer: int, shape: LayerShape, prev: LayerShape | None) -> dict[str, Any]:
        x = "v" if role == V else "k"
        scaled = splits(self.o["preset"], n_layer)
        q, m = (self.o[k] if self.o[k] != -1 else scaled[k] for k in (f"{x}q", f"{x}m"))
        bits = 2 if ordinal < q else 1
        same = prev is not None and (prev.n_head_kv, prev.head_size_k, prev.head_size_v) == (
            shape.n_head_kv,
            shape.head_size_k,
            shape.head_size_v,
        )
        shares = bool(ordinal % 2 and ordinal >= m and same)
        eta = self.o["eta1" if bits == 1 else "eta2"]
        if shares and self.o["shared"] == "none":  # null baseline: parameters only
            return {"bits": 0, "eta": eta}
        return {"bits": bits, "eta": eta, "shares_codes": shares}
