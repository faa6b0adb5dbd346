#!/usr/bin/env python3
"""Make the vector grids of the lattice formats: k-means on the standard normal, seeded, checked against known errors.

Writes ggml-kvq/types/lattice_grids.h and python/ggml_kvq/reference/lattice_grids.py. A grid of n points in d
dimensions stores log2(n)/d bits a value. Coordinates are a whole number, at most 63 in size, times the grid's step (in
units of 2^-12), so that attention multiplies them as bytes without rounding; 127 where 63 would cost more than 1 % of
error (d=2 n=256). Needs numpy; a few minutes.
"""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
UNIT = 4096
#: (d, n) -> mean squared error per coordinate on N(0,1): AQUA-KV's EDEN grids for two bits and more, k-means at one bit
GRIDS = {
    (2, 4): 0.3634,
    (4, 16): 0.348,
    (8, 256): 0.324,
    (2, 16): 0.1080,
    (4, 256): 0.0964,
    (2, 64): 0.0297,
    (2, 256): 0.00773,
}


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
    """Lloyd's algorithm from a seeded draw, shaken less and less (stochastic relaxation) so that it leaves poor
    optima.
    """
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


def make(d: int, n: int, target: float) -> tuple[np.ndarray, int]:
    test = np.random.default_rng(99).normal(size=(1 << 18, d)).astype(np.float32)
    best, error = None, np.inf
    for seed in range(1 if d == 8 else 2):
        grid = k_means(d, n, seed, 1 << 19, 480 if (d, n) == (2, 256) else 180)
        e = mse(test, grid)
        if e < error:
            best, error = grid, e
    assert best is not None
    for limit in (63, 127):
        points, step = whole(best, limit)
        error = mse(test, points.astype(np.float32) * step / UNIT)
        if error <= 1.01 * target:
            print(
                f"d={d} n={n}: mse {error:.5f}, expected {target}; step {step}, coordinates up to"
                f" {np.abs(points).max()}"
            )
            return points[np.lexsort(points.T[::-1])], step
    raise SystemExit(f"grid d={d} n={n} has mse {error:.5f}, more than 1 % above {target}")


def whole(grid: np.ndarray, limit: int) -> tuple[np.ndarray, int]:
    """(coordinates int8 of at most `limit`, step in units of 2^-12) nearest to the grid."""
    least = int(np.ceil(np.abs(grid).max() * UNIT / limit))
    steps = range(least, least + least // 8 + 1)
    step = min(steps, key=lambda s: float(((np.rint(grid * (UNIT / s)) * (s / UNIT) - grid) ** 2).sum()))
    return np.rint(grid * (UNIT / step)).astype(np.int8), step


Grids = dict[tuple[int, int], tuple[np.ndarray, int]]


def header(grids: Grids) -> str:
    out = [
        (
            "// Made by scripts/make_grids.py: points of the lattice grids, [n][d], in steps of their grid; steps in"
            " units of 2^-12."
        ),
        "#pragma once",
        "",
        "#include <cstdint>",
        "",
    ]
    for (d, n), (g, step) in grids.items():
        values = [str(v) for v in g.reshape(-1)]
        out.append(f"static const int    kvq_grid_step_d{d}_n{n} = {step};")
        out.append(f"static const int8_t kvq_grid_d{d}_n{n}[] = {{")
        out += ["    " + ", ".join(values[i : i + 16]) + "," for i in range(0, len(values), 16)]
        out += ["};", ""]
    return "\n".join(out)


def module(grids: Grids) -> str:
    out = [
        (
            '"""Made by scripts/make_grids.py: steps of the lattice grids by (d, n) in units of 2^-12, and their points'
            ' in steps, int8 [n, d]."""'
        ),
        "",
    ]
    out += ["", "import base64", "", "import numpy as np", "", "STEPS = {"]
    out += [f"    ({d}, {n}): {step}," for (d, n), (_, step) in grids.items()]
    out += ["}", "_TEXT = {"]
    out += [f'    ({d}, {n}): "{base64.b64encode(g.tobytes()).decode()}",' for (d, n), (g, _) in grids.items()]
    out += [
        "}",
        (
            "POINTS = {key: np.frombuffer(base64.b64decode(text), np.int8).reshape(key[1], key[0]) for key, text in"
            " _TEXT.items()}"
        ),
        "",
    ]
    return "\n".join(out)


if __name__ == "__main__":
    made = {(d, n): make(d, n, target) for (d, n), target in GRIDS.items()}
    (ROOT / "ggml-kvq/types/lattice_grids.h").write_text(header(made))
    (ROOT / "python/ggml_kvq/reference/lattice_grids.py").write_text(module(made))
