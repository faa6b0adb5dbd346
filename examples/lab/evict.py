"""Methods that let cells go. Rows stay f16, so bits are the share of cells that is held, times 16."""

import numpy as np
from ggml_kvq.lab import Cells, Decoded, Method, Page


class Exact(Method):
    def seal(self, page: Page) -> Decoded:
        return Decoded(page.keys, page.values, bits=16)


class StreamingLlm(Exact):
    """StreamingLLM (Xiao et al., ICLR 2024): the first cells and a window, nothing else."""

    sinks: int = 4
    keep: float = 0.0

    def scores(self, cells: Cells) -> np.ndarray:
        return np.zeros_like(cells.probabilities)


class SnapKv(Exact):
    """As SnapKV (Li et al., NeurIPS 2024): what the newest 32 queries look at stays, with its neighbours (a maximum
    over 7 cells). SnapKV judges once, at the end of a prompt; here every batch judges what is left."""

    keep: float = 0.5

    def scores(self, cells: Cells) -> np.ndarray:
        p = np.pad(cells.probabilities, ((0, 0), (3, 3)))
        return np.lib.stride_tricks.sliding_window_view(p, 7, axis=1).max(-1)


class H2o(Exact):
    """H2O (Zhang et al., NeurIPS 2023): the sum of all attention that a cell ever got, of up to 4096 tokens a batch."""

    keep: float = 0.5
    n_observed = 4096

    def scores(self, cells: Cells) -> np.ndarray:
        return cells.scores + cells.n_queries * cells.probabilities
