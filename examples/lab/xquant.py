"""XQuant (Yang et al. 2025): KIVI blocks with their ends pulled inward by eta, and layers in pairs: behind half of the
layers the second one of a pair takes the codes of the first and has a scale and a zero of its own alone."""

import numpy as np
from ggml_kvq.lab import Decoded, Method, Page, Sample, f16


class XQuant(Method):
    def fit(self, sample: Sample) -> None:
        n = len(sample.layers)  # preset 1.38: 30, 2, 32 and 16 of 32 layers, in whole pairs
        self.q = {"k": 2 * (30 * n // 64), "v": 2 * -(-2 * n // 64)}  # 2 bits below, 1 from here on
        self.m = {"k": 2 * (32 * n // 64), "v": 2 * -(-16 * n // 64)}  # shared codes from here on
        self.codes: dict = {}

    def lane(self, x: np.ndarray, what: str, page: Page, axis: int) -> tuple[np.ndarray, float]:
        il = page.layer
        two, shared = il < self.q[what], il % 2 == 1 and il >= self.m[what]
        eta, n = (0.045, 3) if two else (1 / 6, 1)
        groups = np.moveaxis(x, axis, -1)
        g = groups.reshape(*groups.shape[:-1], -1, 32)
        low, span = g.min(-1, keepdims=True), np.ptp(g, axis=-1, keepdims=True)
        shared = shared and page.layer_before == il - 1  # another cache holds other cells
        code = np.clip(np.floor((g - low) * (n / np.where(span > 0, span, 1)) + 0.5), 0, n)
        code = self.codes[what, il - 1, page.stream] if shared else code
        if not il % 2:
            self.codes[what, il, page.stream] = code  # its partner seals the same pages next
        back = f16(low + eta * span) + f16((1 - 2 * eta) * span / n) * code
        return np.moveaxis(back.reshape(groups.shape), -1, axis), (0 if shared else 1 + two) + 32 / 32

    def seal(self, page: Page) -> Decoded:
        keys, bits_k = self.lane(page.keys, "k", page, 1)
        values, bits_v = self.lane(page.values, "v", page, 3)
        return Decoded(keys, values, bits=(bits_k, bits_v))
