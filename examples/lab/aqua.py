"""AQUA-KV (Shutova et al., arXiv 2501.19392) without predictors: keys before rotary embedding and values, less their
means over a sample, as HIGGS codes; the first layer in 4 bits."""

import numpy as np
from ggml_kvq.lab import Decoded, Method, Page, Sample, hadamard, lattice, u8_scales


class Aqua(Method):
    bits: int = 2
    sinks: int = 4

    def fit(self, sample: Sample) -> None:
        self.means = {x.layer: (x.keys_before.mean(0), x.values.mean(0)) for x in sample.layers}
        self.table_bytes = sum(4 * k.size + 4 * v.size for k, v in self.means.values())

    def code(self, x: np.ndarray, mean: np.ndarray, bits: int) -> np.ndarray:
        y = hadamard(x - mean)
        scale = u8_scales(np.sqrt(np.square(y).mean(-1, keepdims=True)))
        return hadamard(lattice(y / scale, bits) * scale) + mean

    def seal(self, page: Page) -> Decoded:
        mean_k, mean_v = self.means[page.layer]
        bits = 4 if page.layer == 0 else self.bits
        keys, values = self.code(page.keys_before, mean_k, bits), self.code(page.values, mean_v, bits)
        return Decoded(keys_before=keys, values=values, bits=bits + (8 + 16 / self.page) / page.keys.shape[-1])
