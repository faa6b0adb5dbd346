"""HIGGS (Malinovskii et al., arXiv 2411.17525): a Hadamard matrix turns every row of a head, which gets one scale;
pairs of channels become the nearest point of a grid."""

import numpy as np
from ggml_kvq.lab import Decoded, Method, Page, hadamard, lattice, u8_scales


def code(x: np.ndarray, bits: int) -> np.ndarray:
    y = hadamard(x)
    scale = u8_scales(np.sqrt(np.square(y).mean(-1, keepdims=True)))
    return hadamard(lattice(y / scale, bits) * scale)


class Higgs(Method):
    bits: int = 2
    window: int = 64

    def seal(self, page: Page) -> Decoded:
        bits = self.bits + (8 + 16 / self.page) / page.keys.shape[-1]
        return Decoded(code(page.keys, self.bits), code(page.values, self.bits), bits=bits)
