"""A laboratory method of your own. Run it, beside a built-in method, on any GGUF:

    ggml-kvq eval -m MODEL.gguf -f text.txt --cache lab:FILE.py:Mine,bits=3 --cache kivi:bits=2 --cache upstream:q4_0

docs/laboratory.md tells what there is besides.
"""

import numpy as np

from ggml_kvq.lab import Decoded, Method, Page, Sample


class Mine(Method):
    """Channel means are taken off; each row of a head in `bits` bits, equal steps between its ends."""

    # A field with a default is an option: lab:FILE.py:Mine,bits=3. Method has window, sinks, page, keep and text.
    bits: int = 2

    def fit(self, sample: Sample) -> None:
        # Once before, on keys and values of this model [cells, heads, size]. Leave it out where nothing is learnt.
        self.means = {x.layer: (x.keys_before.mean(0), x.values.mean(0)) for x in sample.layers}
        self.table_bytes = sum(2 * k.size + 2 * v.size for k, v in self.means.values())  # in f16

    def seal(self, page: Page) -> Decoded:
        # For each run of pages of a layer that leaves the window. All arrays are [pages, cells, heads, size].
        # page.keys is behind rotary embedding, page.keys_before before it; page.before is the layer before, as decoded.
        mean_k, mean_v = self.means[page.layer]
        keys = self.code(page.keys_before - mean_k) + mean_k
        values = self.code(page.values - mean_v) + mean_v
        # bits: everything that would be stored, here the codes and two f16 numbers a row of a head
        return Decoded(keys_before=keys, values=values, bits=self.bits + 32 / page.keys.shape[-1])

    def code(self, x: np.ndarray) -> np.ndarray:
        low = x.min(-1, keepdims=True)
        step = (x.max(-1, keepdims=True) - low) / (2**self.bits - 1)
        return low + step * np.round((x - low) / np.where(step > 0, step, 1))

    # To let cells go instead: a score of every cell of a layer, and keep=0.5 among the options. Here it is the sum of
    # all attention that a cell got (H2O). StreamingLlm and SnapKv stand in examples/lab/evict.py too.
    #
    # n_observed = 4096  # the newest queries of a batch that probabilities are the mean of: all of it
    #
    # def scores(self, cells):  # ggml_kvq.lab.Cells
    #     return cells.scores + cells.n_queries * cells.probabilities
