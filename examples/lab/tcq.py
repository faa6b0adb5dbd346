"""Trellis-coded quantisation (Marcellin and Fischer 1990) of rotated rows, 256 states: what forks of llama.cpp call
TCQ. A path through one row of a head; its end is free."""

import numpy as np
from ggml_kvq.lab import Decoded, Method, Page, hadamard, rms, trellis


class Tcq(Method):
    bits: int = 2
    memory: int = 8  # bits of state

    def code(self, x: np.ndarray) -> np.ndarray:
        signs = np.random.default_rng(1).choice(np.array([-1, 1], np.float32), x.shape[-1])
        y = hadamard(x * signs)
        return hadamard(trellis(y / rms(y), self.bits, self.memory) * rms(y)) * signs

    def seal(self, page: Page) -> Decoded:
        bits = self.bits + (16 + self.memory) / page.keys.shape[-1]  # a scale and the first state
        return Decoded(self.code(page.keys), self.code(page.values), bits=bits)
