"""Predictors with parts by energy: what the layer before says of keys and values is left out (AQUA-KV), and what is
left of keys goes into parts by energy (pairs.py). Fitted layer by layer on what the layers before decode to."""

from typing import Any

import numpy as np
from ggml_kvq.lab import Decoded, Method, Page, Sample, ridge
from pairs import block, order, parted


class Predictors(Method):
    parts: str = "4211"
    v_bits: int = 2
    first: int = 4  # bits of the first layer of a cache, which nothing predicts
    sinks: int = 4

    def code(self, k: Any, v: Any, kh: Any, vh: Any, of: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values [pages, cells, heads, size] less their means, as decoded; kh, vh: of the layer before."""
        rows, bits = (*k.shape[:2], -1), [int(b) for b in self.parts] if kh is not None else [self.first]
        guess = (kh.reshape(rows) @ of["k"]).reshape(k.shape) if kh is not None else 0
        if "gains" not in of:
            of["pairs"], of["gains"] = order(of["x"], (k - guess)[0])
        nk = parted(k - guess, of["pairs"], of["gains"], bits) + guess
        if kh is None:
            return nk, block(v, self.first)
        both = np.concatenate([nk.reshape(rows), vh.reshape(rows)], -1)
        if "v" not in of:
            of["v"] = ridge(both[0], v[0].reshape(len(both[0]), -1))
        guess = (both @ of["v"]).reshape(v.shape)
        return nk, block(v - guess, self.v_bits) + guess

    def fit(self, sample: Sample) -> None:
        self.of, last = dict[Any, Any](), dict[Any, Any]()
        for i, x in enumerate(sample.layers):
            of = self.of[x.layer] = {"x": x, "mk": x.keys_before.mean(0), "mv": x.values.mean(0)}
            k, v = (x.keys_before - of["mk"])[None], (x.values - of["mv"])[None]
            kh, vh = last.get(x.before, (None, None))
            if kh is not None:
                of["k"] = ridge(kh[0].reshape(kh.shape[1], -1), k[0].reshape(k.shape[1], -1))
            last[i] = self.code(k, v, kh, vh, of)
        self.table_bytes = sum(2 * a.size for of in self.of.values() for key, a in of.items() if key != "x")

    def seal(self, page: Page) -> Decoded:
        of, b, scale = self.of[page.layer], page.before, (8 + 16 / self.page) / page.keys.shape[-1]
        last = self.of.get(page.layer_before, {})
        kh, vh = (b.keys_before - last["mk"], b.values - last["mv"]) if b else (None, None)
        nk, nv = self.code(page.keys_before - of["mk"], page.values - of["mv"], kh, vh, of)
        bits = [int(x) for x in self.parts] if b else [self.first]
        costs = (sum(bits) / len(bits) + len(bits) * scale, (self.v_bits if b else self.first) + scale)
        return Decoded(keys_before=nk + of["mk"], values=nv + of["mv"], bits=costs)
