"""KVarN (Muller et al., arXiv 2606.03458): tiles of 128 cells and a head, turned by a Hadamard matrix, brought to equal
variance along both axes, then rounded: keys per channel, values per cell."""

import numpy as np
from ggml_kvq.lab import Decoded, Method, Page, affine, f16, hadamard


class KVarN(Method):
    bits: int = 2
    v_bits: int = 0
    page: int = 128

    def code(self, x: np.ndarray, bits: int, axis: int) -> np.ndarray:
        y = hadamard(x)
        cells, channels = np.ones_like(y[..., :1]), np.ones_like(y[:, :1])
        for _ in range(16):  # root mean squares: turned rows have next to no mean
            cells = cells * np.sqrt(np.square(y / cells / channels).mean(3, keepdims=True) + 1e-8)
            channels = channels * np.sqrt(np.square(y / cells / channels).mean(1, keepdims=True) + 1e-8)
        level = channels.mean(3, keepdims=True)  # which of the two has it is free: f16 holds both
        cells, channels = f16(cells * level).clip(1e-4), f16(channels / level).clip(1e-4)
        return hadamard(affine(y / cells / channels, bits, axis) * cells * channels)

    def seal(self, page: Page) -> Decoded:
        size, v_bits = page.keys.shape[-1], self.v_bits or self.bits
        # rounding's scale and zero take in one of the two factors
        keys = self.bits + 32 / self.page + 16 / size
        values = v_bits + 32 / size + 16 / self.page
        return Decoded(self.code(page.keys, self.bits, 1), self.code(page.values, v_bits, 3), bits=(keys, values))
