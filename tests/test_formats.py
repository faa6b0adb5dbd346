"""Block formats: numpy definition == C, byte for byte, over every shape, format and kind of input that can hurt.

Every case draws from a generator seeded by its own name; the seed is in the failure message.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from ctypes import CDLL
from typing import Any

import numpy as np
import pytest
from ggml_kvq import reference as ref
from ggml_kvq.core import kernels, loader
from ggml_kvq.errors import MethodError
from ggml_kvq.reference import AFFINE, F16, Codec, K, V, affine

HEADS = (64, 72, 80, 96, 128, 256)
GROUPS = (16, 32, 64, 128)
PAGES = (32, 64, 128)


@pytest.fixture(scope="module")
def lib() -> Any:
    return loader.libraries().need_kvq()


def seed_of(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())


def codecs(heads: Any = HEADS) -> Any:
    """Every role, width, scale format, level placement and eta; all groups and pages that fit each other."""
    for role, bits, scale, head in itertools.product((K, V), range(5), (0, 1, 2), heads):
        for group, n_cells in itertools.product(GROUPS, PAGES):
            if (role == K and n_cells % group) or (role == V and (group > head or n_cells == 64)):
                continue
            yield Codec(
                AFFINE, role, bits, group, scale, 0, (0.0, 1 / 6, 0.045, 0.25)[(bits + head) % 4], n_cells, head
            )
        if bits:
            yield Codec(AFFINE, role, bits, 32, scale, 1, 0.5 / (1 << bits), 32, head)
        if role == V:
            yield Codec(
                AFFINE, role, bits, head, scale, 0, 0.1, 32, head
            )  # one group a head, also where 16 does not divide it


def finite_bits(rng: Any, shape: Any) -> Any:
    """Any finite f16, denormals and both zeros as likely as their bit patterns."""
    x = rng.integers(0, 1 << 16, shape, np.uint16)
    return np.where((x & 0x7C00) == 0x7C00, x & 0x83FF, x).view(np.float16)


def f16_bits(rng: Any, shape: Any) -> Any:
    return rng.integers(0, 1 << 16, shape, np.uint16).view(np.float16)


def sprinkle(x: Any, rng: Any, values: Any, share: float = 0.1) -> Any:
    at = rng.random(x.shape) < share
    return np.where(at, rng.choice(np.array(values, np.float16), x.shape), x)


INPUTS: dict[str, Callable[[Any, Any], np.ndarray]] = {
    "normal": lambda r, s: r.normal(size=s).astype(np.float16),
    "offset": lambda r, s: (100 + 0.05 * r.normal(size=s)).astype(np.float16),
    "outlier channels": lambda r, s: (r.normal(size=s) * np.exp(2 * r.normal(size=s[1]))).astype(np.float16),
    "extreme": lambda r, s: r.choice(np.array([-65504, 65504], np.float16), s),  # a range that f16 cannot hold
    "near extreme": lambda r, s: (r.uniform(-65504, 65504, s)).astype(np.float16),
    "constant": lambda r, s: np.full(s, r.normal(), np.float16),
    "zeros of both signs": lambda r, s: r.choice(np.array([0.0, -0.0], np.float16), s),
    "denormal": lambda r, s: r.integers(-1023, 1024, s).astype(np.float16) * np.float16(2**-24),
    "any finite": finite_bits,
    "any f16": f16_bits,
    "inf and nan": lambda r, s: sprinkle(r.normal(size=s).astype(np.float16), r, [np.inf, -np.inf, np.nan]),
    "all nan": lambda r, s: np.full(s, np.nan, np.float16),
    "ties": lambda r, s: r.integers(-6, 7, s).astype(np.float16) / 4,  # values half-way between codes
    "two values": lambda r, s: r.choice(np.array([1.0, 1.0009765625], np.float16), s),
}


def same_rows(a: Any, b: Any) -> Any:
    """Equal bits; a nan equals any nan, its payload is not defined."""
    a, b = a.view(np.float16), b.view(np.float16)
    nan = np.isnan(a) & np.isnan(b)
    return np.array_equal(a.view(np.uint16)[~nan], b.view(np.uint16)[~nan])


def check(lib: CDLL, c: Codec, rows: Any, valid: Any = None, shared: Any = None, what: str = "") -> Any:
    want_codes, want_params = ref.encode(c, rows, valid, shared)
    codes, params = kernels.encode(lib, c, rows, valid, shared)
    assert ref.nbytes(c) == kernels.nbytes(lib, c) == (codes.size, params.size), what
    assert np.array_equal(params, want_params), f"params differ: {what}"
    assert np.array_equal(codes, want_codes), f"codes differ: {what}"
    decoded = ref.decode(c, codes, params)
    assert np.isfinite(decoded).all(), what
    assert same_rows(kernels.decode(lib, c, codes, params), decoded), f"decode differs: {what}"
    return codes, params


@pytest.mark.parametrize("kind", INPUTS)
def test_encode_equals_definition(lib: CDLL, kind: Any) -> None:
    n = 0
    for i, c in enumerate(codecs()):
        if kind not in ("normal", "any f16") and i % 5 != seed_of(kind) % 5:
            continue  # a fifth of the formats for each further kind; every format meets several kinds
        seed = seed_of(kind, c)
        rng = np.random.default_rng(seed)
        check(lib, c, INPUTS[kind](rng, (c.n_cells, c.head_size)), what=f"{c} {kind} seed {seed}")
        n += 1
    assert n > 100


@pytest.mark.parametrize(("bits", "group"), [(4, 128), (2, 16)])
def test_a_far_channel_costs_the_others_little(lib: CDLL, bits: int, group: int) -> Any:
    """8-bit parameters share their range with those of a channel that lies far from zero, as keys with large biases
    have it: codes are chosen under what is stored, not under the exact range.
    """
    rng = np.random.default_rng(seed_of("far channel", bits))
    rows = rng.standard_normal((128, 64))
    rows[:, 17] += 300
    rows = rows.astype(np.float16)
    others = np.arange(64) != 17
    want = rows[:, others].astype(np.float64)

    def error(scale: Any) -> Any:
        c = Codec(AFFINE, K, bits, group, scale, 0, 0.0, 128, 64)
        return np.linalg.norm(kernels.decode(lib, c, *kernels.encode(lib, c, rows))[:, others] - want)

    assert error(1) < 1.15 * error(0)  # under the exact range: 3.9 and 1.4 times


@pytest.mark.parametrize("kind", ["normal", "any f16", "extreme"])
def test_valid_cells_alone_set_the_parameters(lib: CDLL, kind: Any) -> None:
    for c in codecs((72, 128)):
        seed = seed_of("valid", kind, c)
        rng = np.random.default_rng(seed)
        rows = INPUTS[kind](rng, (c.n_cells, c.head_size))
        for valid in (
            rng.integers(0, 256, c.n_cells // 8, np.uint8),
            np.eye(1, c.n_cells // 8, rng.integers(c.n_cells // 8), np.uint8)[
                0
            ],  # one cell, so groups of one value or none
            np.zeros(c.n_cells // 8, np.uint8),
        ):
            _, params = check(lib, c, rows, valid, what=f"{c} {kind} seed {seed} valid {valid}")
            ok = np.unpackbits(valid, bitorder="little").astype(bool)
            other = np.where(ok[:, None], rows, np.float16(3e4))
            assert np.array_equal(kernels.encode(lib, c, other, valid)[1], params), (
                f"{c}: an empty cell moved the parameters"
            )


def test_shared_codes_are_adopted(lib: CDLL) -> None:
    for c in codecs((80, 128)):
        if not c.bits:
            continue
        rng = np.random.default_rng(seed_of("shared", c))
        first, second = (rng.normal(size=(c.n_cells, c.head_size)).astype(np.float16) for _ in range(2))
        codes, _ = check(lib, c, first)
        adopted, params = check(lib, c, second, shared=codes)
        own, own_params = kernels.encode(lib, c, second)
        assert np.array_equal(params, own_params) and not np.array_equal(own, adopted)


def test_random_packed_bytes_decode_alike(lib: CDLL) -> None:
    for c in codecs():
        seed = seed_of("bytes", c)
        rng = np.random.default_rng(seed)
        nb_codes, nb_params = ref.nbytes(c)
        codes, params = (rng.integers(0, 256, nb_codes, np.uint8), rng.integers(0, 256, nb_params, np.uint8))
        assert same_rows(kernels.decode(lib, c, codes, params), ref.decode(c, codes, params)), f"{c} seed {seed}"


def test_pack_and_unpack(lib: CDLL) -> None:
    """Identity, endianness and tail groups of the bit fields, against a byte map written value by value."""
    for c in codecs((72, 128)):
        rng = np.random.default_rng(seed_of("pack", c))
        q = rng.integers(0, 1 << c.bits, (c.n_cells, c.head_size)).astype(np.uint8)
        packed = affine.pack(c, q)
        assert packed.size == ref.nbytes(c)[0] and np.array_equal(affine.unpack(c, packed), q)
        for _ in range(4):
            cell, channel = rng.integers(c.n_cells), rng.integers(c.head_size)
            lane, dot = (cell, channel) if c.role == K else (channel, cell)
            lanes, dots = (c.n_cells, c.head_size) if c.role == K else (c.head_size, c.n_cells)
            at, code, low = 0, 0, 0
            for w in {0: [], 1: [1], 2: [2], 3: [2, 1], 4: [4]}[c.bits]:
                chunks = -(-dots * w // 32)
                chunk, rest = divmod(dot, 32 // w)
                byte = packed[at + (lane // 16 * chunks + chunk) * 64 + lane % 16 * 4 + rest % 4]
                code |= (int(byte) >> rest // 4 * w & (1 << w) - 1) << low
                at, low = at + -(-lanes // 16) * chunks * 64, low + w
            assert code == q[cell, channel]


@pytest.mark.parametrize(
    "kind", ["normal", "outlier channels", "near extreme", "constant", "denormal", "offset", "ties"]
)
def test_image(lib: CDLL, kind: Any) -> None:
    """The image of a block is alike in both; reading it gives the parameters back, and codes that have the same
    image.
    """
    for c in codecs((72, 128)):
        seed = seed_of("image", kind, c)
        what = f"{c} {kind} seed {seed}"
        rng = np.random.default_rng(seed)
        codes, params = ref.encode(c, INPUTS[kind](rng, (c.n_cells, c.head_size)))
        rows = ref.image.write(c, codes, params)
        assert np.array_equal(kernels.image(lib, c, codes, params), rows), what
        got, want = kernels.image_match(lib, c, rows), ref.image.read(c, rows)
        assert got is not None and want is not None, what
        assert np.array_equal(got[0], want[0]) and np.array_equal(got[1], want[1]), what
        assert np.array_equal(got[1], params), f"parameters lost: {what}"
        assert np.array_equal(ref.image.write(c, *got), rows), f"another image: {what}"
        shared = kernels.image_match(lib, c, rows, shared=codes)
        assert shared is not None and np.array_equal(shared[1], params), what


def test_image_restores_codes_that_f16_tells_apart(lib: CDLL) -> None:
    """With group steps well above the image's own rounding, the very same block comes back."""
    for c in codecs((64, 128)):
        if not c.bits or c.scale or c.group < 32:
            continue
        rng = np.random.default_rng(seed_of("codes", c))
        codes, params = ref.encode(c, rng.normal(size=(c.n_cells, c.head_size)).astype(np.float16))
        got = kernels.image_match(lib, c, kernels.image(lib, c, codes, params))
        assert got is not None and np.array_equal(got[0], codes) and np.array_equal(got[1], params), c


def test_plain_rows_are_no_image(lib: CDLL) -> None:
    for c in codecs((72, 128)):
        rng = np.random.default_rng(seed_of("plain", c))
        rows = rng.normal(size=(c.n_cells, c.head_size)).astype(np.float16)
        image = ref.image.write(c, *ref.encode(c, rows))
        assert kernels.image_match(lib, c, rows) is None and ref.image.read(c, rows.view(np.uint16)) is None
        image[rng.integers(c.n_cells), rng.integers(c.head_size)] ^= 0x4000  # one value doubled or more
        assert (kernels.image_match(lib, c, image) is None) == (ref.image.read(c, image) is None) is True


@pytest.mark.parametrize("head", HEADS)
def test_f16_rows_come_back(lib: CDLL, head: int) -> None:
    c = Codec(F16, K, 16, 32, 0, 0, 0.0, 32, head)
    rows = f16_bits(np.random.default_rng(head), (32, head))
    codes, params = kernels.encode(lib, c, rows)
    assert np.array_equal(codes, ref.encode(c, rows)[0]) and params.size == 0
    assert np.array_equal(kernels.decode(lib, c, codes, params).view(np.uint16), rows.view(np.uint16))
    assert np.array_equal(kernels.image(lib, c, codes, params), rows.view(np.uint16))


def test_every_f16_survives_its_own_group(lib: CDLL) -> None:
    """All 63488 finite f16 values as one-value groups: zero holds the value itself, whatever the width."""
    x = np.arange(1 << 16, dtype=np.uint16)
    x = x[(x & 0x7C00) != 0x7C00].view(np.float16).reshape(-1, 32)
    for bits, eta in ((1, 0.25), (2, 0.0), (4, 0.045)):
        c = Codec(AFFINE, K, bits, 32, 0, 0, eta, 32, 32)
        for column in x.reshape(-1, 32):
            rows = np.tile(column, (32, 1))
            codes, params = check(lib, c, rows)
            assert np.array_equal(kernels.decode(lib, c, codes, params), rows)


BAD = Codec(AFFINE, K, 2, 32, 0, 0, 0.0, 32, 64)


@pytest.mark.parametrize(
    "fields",
    [
        {"bits": 5},
        {"bits": -1},
        {"n_cells": 0},
        {"n_cells": 40},
        {"n_cells": 512},
        {"head_size": 0},
        {"head_size": 68},
        {"head_size": 2048},
        {"group": 0},
        {"group": -16},
        {"group": 8},
        {"group": 24, "n_cells": 96},
        {"group": 64},
        {"role": V, "group": 128},
        {"role": V, "group": 24},
        {"role": 2},
        {"eta": 0.5},
        {"eta": -0.1},
        {"eta": float("nan")},
        {"type": 9},
        {"scale": 3},
        {"scale": -1},
        {"levels": 2},
    ],
    ids=str,
)
def test_refused_formats(lib: CDLL, fields: Any) -> None:
    with pytest.raises(MethodError, match=r"\w"):
        kernels.nbytes(lib, BAD.with_(**fields))
