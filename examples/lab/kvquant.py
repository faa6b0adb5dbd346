"""KVQuant (Hooper et al., NeurIPS 2024): keys before rotary embedding per channel, scaled on a sample, values per
cell; a grid fitted to each layer by k-means; the `share` farthest values apart, sparse, in f16."""

import numpy as np
from ggml_kvq.lab import Decoded, Method, Page, Sample, f16, nearest


class KvQuant(Method):
    bits: int = 3
    share: float = 0.01
    sinks: int = 1  # "attention sink-aware"

    def fit(self, sample: Sample) -> None:
        self.table: dict = {}
        for x in sample.layers:
            tail = 100 * self.share / 2
            low, top = (np.percentile(x.keys_before, q, axis=0) for q in (tail, 100 - tail))
            mid, half = (low + top) / 2, np.maximum(top - low, 1e-3) / 2
            own = np.percentile(x.values, (tail, 100 - tail), axis=-1, keepdims=True)
            values = (x.values - own.mean(0)) / np.ptp(own, axis=0) * 2
            grids = [self.k_means(y[np.abs(y) <= 1]) for y in ((x.keys_before - mid) / half, values)]
            self.table[x.layer] = mid.astype(np.float32), half.astype(np.float32), *grids
        self.table_bytes = sum(2 * sum(a.size for a in t) for t in self.table.values())

    def k_means(self, y: np.ndarray) -> np.ndarray:
        y, grid = y[:: len(y) // 20000 + 1], np.linspace(-1, 1, 2**self.bits)
        for _ in range(60):
            i = np.searchsorted((grid[1:] + grid[:-1]) / 2, y)
            grid = np.bincount(i, y, len(grid)) / np.bincount(i, minlength=len(grid)).clip(1)
        return np.sort(grid).astype(np.float32)

    def seal(self, page: Page) -> Decoded:
        mid, half, grid_k, grid_v = self.table[page.layer]
        tail, (k, v) = 100 * self.share / 2, (page.keys_before, page.values)
        own = f16(np.percentile(v, (tail, 100 - tail), axis=-1, keepdims=True))
        at, by = own.mean(0), np.maximum(np.ptp(own, axis=0), 1e-3) / 2
        keys = np.where(np.abs(k - mid) > half, k, nearest((k - mid) / half, grid_k) * half + mid)
        values = np.where(np.abs(v - at) > by, v, nearest((v - at) / by, grid_v) * by + at)
        apart = [float((a == b).mean()) * 32 for a, b in ((keys, k), (values, v))]  # value and place
        return Decoded(
            keys_before=keys, values=values, bits=(self.bits + apart[0], self.bits + apart[1] + 32 / v.shape[-1])
        )
