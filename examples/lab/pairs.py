"""Pairs by energy: rotary pairs of keys in the order of what an error of theirs costs (energy of keys times energy of
queries), in quarters with 4, 2, 1 and 1 bits; a gain brings each pair to unit variance. Values in 2 bits."""

import numpy as np
from ggml_kvq.lab import Decoded, LayerSample, Method, Page, Sample, hadamard, lattice, u8_scales


def block(y: np.ndarray, bits: int) -> np.ndarray:
    """One Hadamard block [pages, cells, heads, channels], each row with a scale of its own."""
    y = hadamard(y)
    scale = u8_scales(np.sqrt(np.square(y).mean(-1, keepdims=True)))
    return hadamard(lattice(y / scale, bits) * scale)


def order(x: LayerSample, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Channels and gains [heads, size] of keys [cells, heads, size], those first whose error costs most."""
    energy = np.square(keys).mean(0)[:, x.pairs].mean(-1)
    first = np.argsort(-energy * x.queries, axis=1)
    gains = np.repeat(1 / np.sqrt(np.take_along_axis(energy, first, 1) + 1e-9), 2, axis=1)
    return x.pairs[first].reshape(len(first), -1), gains.astype(np.float32)


def parted(keys: np.ndarray, channels: np.ndarray, gains: np.ndarray, bits: list[int]) -> np.ndarray:
    y = np.take_along_axis(keys, channels[None, None], -1) * gains
    y = np.concatenate([block(p, b) for p, b in zip(np.split(y, len(bits), -1), bits)], -1) / gains
    out = np.empty_like(y)
    np.put_along_axis(out, np.broadcast_to(channels, y.shape), y, -1)
    return out


class Pairs(Method):
    parts: str = "4211"
    v_bits: int = 2
    first: int = 0  # bits of a layer without one before it, instead; 0: as the others
    sinks: int = 4

    def fit(self, sample: Sample) -> None:
        means = {x.layer: (x.keys_before.mean(0), x.values.mean(0)) for x in sample.layers}
        self.of = {x.layer: (*means[x.layer], *order(x, x.keys_before - means[x.layer][0])) for x in sample.layers}
        self.table_bytes = sum(4 * a.size for of in self.of.values() for a in of)

    def seal(self, page: Page) -> Decoded:
        mean_k, mean_v, pairs, gains = self.of[page.layer]
        bits, v_bits = [int(b) for b in self.parts], self.v_bits
        if self.first and page.before is None:
            bits, v_bits = [self.first], self.first
        scale = (8 + 16 / self.page) / page.keys.shape[-1]
        keys = parted(page.keys_before - mean_k, pairs, gains, bits) + mean_k
        values = block(page.values - mean_v, v_bits) + mean_v
        costs = (sum(bits) / len(bits) + len(bits) * scale, v_bits + scale)
        return Decoded(keys_before=keys, values=values, bits=costs)
