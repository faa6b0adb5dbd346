"""Which channels of a key lie in one block, and with which gains (sorted keys, kvq_order in ggml-kvq.h).

Of a KV head let e_p be the energy of the keys' rotary pair p, less its mean, and q_p that of the queries: mean squares,
which do not change with the position. A block of n pairs is rotated, so that its quantisation error is the same in all
of its channels, D(bits) times the mean of e_p g_p^2 when pair p has gain g_p. A logit then errs by

    sum_p q_p / g_p^2 * D(bits) / n * sum_p e_p g_p^2        which is least for  g_p^2 ~ sqrt(q_p / e_p):
    D(bits) / n * (sum_p sqrt(e_p q_p))^2

So pairs are sorted by e_p q_p, and the strong half gets more bits. The order is that of keys' blocks: weak pairs first,
the two channels of a pair side by side.

The same sum says what a layer's keys lose with each number of bits, before anything is tried (logit_errors). That sets
the order in which keys and values of layers get more bits (ladder.climb).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Mean square error of a value of variance 1 in a block of so many bits (types/lattice.h)
ERRORS = {0: 1.0, 1: 0.3634, 2: 0.1080, 3: 0.0275, 4: 0.0072}
LEAST = 1e-6  # of the strongest pair's energy: what is weaker counts as that


def pair_channels(head_size: int, kind: str) -> np.ndarray:
    """Channels that rotary embedding turns together, int [head_size/2, 2]; kind: norm or neox."""
    first = np.arange(head_size // 2)
    return np.stack([first, first + head_size // 2] if kind == "neox" else [2 * first, 2 * first + 1], axis=1)


def sorted_keys(keys: np.ndarray, queries: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """keys, queries: mean squares f64 [heads, head_size], of keys less their means. Returns (channel, gain), f32
    [heads, head_size]: kvq_order's arrays.
    """
    pairs = pair_channels(keys.shape[1], kind)
    channel, gain = np.empty(keys.shape, np.float32), np.empty(keys.shape, np.float32)
    for h in range(len(keys)):
        e, q = (x[h][pairs].sum(1) for x in (keys, queries))
        e, q = (np.maximum(x, max(x.max() * LEAST, 1e-30)) for x in (e, q))
        g = (q / e) ** 0.25
        g /= np.exp(np.log(g).mean())  # rows stay about as large as they were
        by_weight = np.argsort(e * q, kind="stable")
        channel[h] = pairs[by_weight].reshape(-1)
        gain[h] = np.clip(g[by_weight], 2.0**-14, 2.0**14).repeat(2)
    return channel, gain


def logit_errors(
    keys: np.ndarray, queries: np.ndarray, kind: str, halves: Sequence[tuple[int, int]], one_block: bool = True
) -> list[float]:
    """Mean square error of a logit for sorted keys of each (weak, strong) bits, over the heads of a layer. keys,
    queries: as sorted_keys takes them, queries as capture.queries gives them, in the units of logits. one_block: keys
    of equal bits are not in halves.
    """
    size = keys.shape[1]
    pairs = pair_channels(size, kind)
    e, q = (x[:, pairs].sum(-1) for x in (keys, queries))
    cost = np.sort(np.sqrt(np.maximum(e * q, 0)), axis=1)  # weak pairs first
    weak, strong = (np.square(half.sum(1)).mean() / half.shape[1] for half in np.split(cost, 2, axis=1))
    dropped = np.square(np.split(cost, 2, axis=1)[0]).sum(1).mean()  # without bits gains level nothing
    whole = np.square(cost.sum(1)).mean() / cost.shape[1]

    def error(w: int, s: int) -> float:
        of_weak = ERRORS[w] * weak if w else dropped
        return ERRORS[s] * whole if one_block and w == s else of_weak + ERRORS[s] * strong

    return [float(error(w, s) / 2 / size) for w, s in halves]
