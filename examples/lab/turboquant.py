"""TurboQuant (Zandieh et al., arXiv 2504.19874): random signs, a Hadamard matrix, a scalar grid for Gaussians. With
residual=true keys have one bit less in the grid, and a bit of sign of a random projection of what that leaves."""

import numpy as np
from ggml_kvq.lab import Decoded, Method, Page, f16, gaussian, hadamard, nearest, rms


class TurboQuant(Method):
    bits: int = 3
    v_bits: int = 0
    residual: bool = False

    def grid(self, x: np.ndarray, bits: int) -> np.ndarray:
        signs = np.random.default_rng(1).choice(np.array([-1, 1], np.float32), x.shape[-1])
        y = hadamard(x * signs)
        return hadamard(nearest(y / rms(y), gaussian(bits)) * rms(y)) * signs

    def sketch(self, rest: np.ndarray) -> np.ndarray:
        """sqrt(pi / 2) / d |r| S' sign(S r), whose product with any query is right on average."""
        d = rest.shape[-1]
        s = np.random.default_rng(2).normal(size=(d, d)).astype(np.float32)
        norm = f16(np.sqrt(np.square(rest).sum(-1, keepdims=True)))
        return np.float32(np.sqrt(np.pi / 2) / d) * norm * (np.sign(rest @ s.T) @ s)

    def seal(self, page: Page) -> Decoded:
        size, v_bits = page.keys.shape[-1], self.v_bits or self.bits
        keys = self.grid(page.keys, self.bits - self.residual)
        if self.residual:
            keys = keys + self.sketch(page.keys - keys)
        bits = (self.bits + (16 + 16 * self.residual) / size, v_bits + 16 / size)
        return Decoded(keys, self.grid(page.values, v_bits), bits=bits)
