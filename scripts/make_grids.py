#!/usr/bin/env python3
"""Make the vector grids of the lattice formats: k-means on the standard normal, seeded, checked against known errors.

Writes ggml-kvq/types/lattice_grids.h and python/ggml_kvq/reference/lattice_grids.py. Coordinates are integers in units of 2^-12.
A grid of n points in d dimensions stores log2(n)/d bits a value. Needs numpy; about a minute.
"""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
UNIT = 4096
#: (d, n) -> mean squared error per coordinate on N(0,1): AQUA-KV's EDEN grids for two bits and more, k-means at one bit
GRIDS = {(2, 4): 0.3634, (4, 16): 0.348, (8, 256): 0.324, (2, 16): 0.1080, (4, 256): 0.0964, (2, 64): 0.0297, (2, 256): 0.00773}


def nearest(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Index of the nearest point of every row."""
    out = np.empty(len(x), np.int64)  # in blocks that stay in cache
    half = (grid * grid).sum(1) / 2
    for at in range(0, len(x), 1 << 12):
        out[at : at + (1 << 12)] = (x[at : at + (1 << 12)] @ grid.T - half).argmax(1)
    return out


def mse(x: np.ndarray, grid: np.ndarray) -> float:
    return float(((x - grid[nearest(x, grid)]) ** 2).mean())


def k_means(d: int, n: int, seed: int, samples: int, rounds: int) -> np.ndarray:
    """Lloyd's algorithm from a seeded draw, shaken less and less (stochastic relaxation) so that it leaves poor optima."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, d)).astype(np.float32)
    # spread the start like the optimal point density, which is the normal's to the power d/(d+2)
    grid = (rng.normal(size=(n, d)) * np.sqrt((d + 2) / d)).astype(np.float32)
    for i in range(rounds):
        cooling = i < 5 * rounds // 6
        part = x[rng.integers(8) :: 8] if cooling else x
        k = nearest(part, grid)
        count = np.bincount(k, minlength=n)
        mean = np.stack([np.bincount(k, part[:, j], n) for j in range(d)], 1) / np.maximum(count, 1)[:, None]
        empty = count == 0
        mean[empty] = mean[count.argmax()]
        shake = 0.5 * n ** (-1 / d) * (1 - i / rounds) ** 3 if cooling else 0.0
        grid = (mean + shake * rng.normal(size=mean.shape)).astype(np.float32)
    return grid


def make(d: int, n: int, target: float) -> np.ndarray:
    test = np.random.default_rng(99).normal(size=(1 << 18, d)).astype(np.float32)
    best, error = None, np.inf
    for seed in range(1 if d == 8 else 2):
        grid = k_means(d, n, seed, 1 << 19, 180)
        e = mse(test, grid)
        if e < error:
            best, error = grid, e
    grid = np.rint(best * UNIT).astype(np.int16)
    grid = grid[np.lexsort(grid.T[::-1])]
    error = mse(test, grid.astype(np.float32) / UNIT)
    print(f"d={d} n={n}: mse {error:.5f}, expected {target}")
    if error > 1.01 * target:
        raise SystemExit(f"grid d={d} n={n} has mse {error:.5f}, more than 1 % above {target}")
    return grid


def header(grids: dict[tuple[int, int], np.ndarray]) -> str:
    out = ["// Made by scripts/make_grids.py: points of the lattice grids, [n][d], units of 2^-12.", "#pragma once", "", "#include <cstdint>", ""]
    for (d, n), g in grids.items():
        values = [str(v) for v in g.reshape(-1)]
        out.append(f"static const int16_t kvq_grid_d{d}_n{n}[] = {{")
        out += ["    " + ", ".join(values[i : i + 16]) + "," for i in range(0, len(values), 16)]
        out += ["};", ""]
    return "\n".join(out)


def module(grids: dict[tuple[int, int], np.ndarray]) -> str:
    out = ['"""Made by scripts/make_grids.py: points of the lattice grids by (d, n), int16 [n, d] in units of 2^-12."""', ""]
    out += ["", "import base64", "", "import numpy as np", "", "_TEXT = {"]
    out += [f'    ({d}, {n}): "{base64.b64encode(g.astype("<i2").tobytes()).decode()}",' for (d, n), g in grids.items()]
    out += ["}", 'GRIDS = {key: np.frombuffer(base64.b64decode(text), "<i2").reshape(key[1], key[0]) for key, text in _TEXT.items()}', ""]
    return "\n".join(out)


if __name__ == "__main__":
    made = {(d, n): make(d, n, target) for (d, n), target in GRIDS.items()}
    (ROOT / "ggml-kvq/types/lattice_grids.h").write_text(header(made))
    (ROOT / "python/ggml_kvq/reference/lattice_grids.py").write_text(module(made))
