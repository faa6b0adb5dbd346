"""SpeCache: far rows and attention over two tiers against reference/specache.py; the method in llama.cpp is in
test_specache_llama.py.
"""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from ggml_kvq import reference as ref
from ggml_kvq.core import kernels, loader, native
from ggml_kvq.errors import MethodError
from ggml_kvq.reference import AFFINE, LATTICE, Codec, K, V, attention, specache

HEADS = (8, 16, 32, 40, 64, 72, 80, 96, 128, 200, 256)


@pytest.fixture(scope="module")
def lib() -> Any:
    return loader.libraries().need_kvq()


# ------------------------------------------------------------------ far rows


def hard_rows(head: int) -> np.ndarray:
    """f16 rows: ordinary ones, zeros, denormals, the largest finite values, blocks whose largest value is negative,
    ties of magnitude.
    """
    rng = np.random.default_rng(head)
    x = rng.normal(size=(64, head)) * np.exp(3 * rng.normal(size=(64, 1)))
    x[0] = 0
    x[1] = np.arange(head) % 7 * 2.0**-24
    x[2] = 65504
    x[3] = -65504
    x[4] = np.where(np.arange(head) % 2, 65504, -65504)
    x[5] = 0
    x[5, ::3] = -(2.0**-14)
    x[6] = -np.abs(x[6])
    x[7] = np.where(np.arange(head) % 3, 1.5, -1.5)
    x[8, 1:] = 0
    x[9] = np.arange(head) - 12.5
    return np.clip(x, -65504, 65504).astype(np.float16)


@pytest.mark.parametrize("form", specache.FAR_FORMATS)
@pytest.mark.parametrize("head", HEADS)
def test_far_rows_equal_the_definition(lib: Any, form: str, head: int) -> None:
    rows = hard_rows(head)
    far = kernels.far_encode(lib, form, rows)
    assert lib.kvq_far_row_bytes(specache.FAR_FORMATS.index(form), head) == far.shape[1]
    assert np.array_equal(far, specache.far_encode(form, rows))
    got, want = kernels.far_decode(lib, form, far, head), specache.far_decode(form, far, head)
    assert np.array_equal(got.view(np.uint16), np.ascontiguousarray(want).view(np.uint16))
    if form == "f16":
        assert np.array_equal(got.view(np.uint16), rows.view(np.uint16))
    x, y = rows.astype(np.float64), got.astype(np.float64)
    assert np.isfinite(y).all()
    blocks = [slice(i, i + specache.FAR_BLOCK) for i in range(0, head, specache.FAR_BLOCK)]
    for b in blocks:  # half a step of 8 bits, a whole one of 4: +8 is clamped to +7; scales are f16 of 11 bits
        most = np.abs(x[:, b]).max(1, keepdims=True)
        step = {"f16": 0, "q8": 0.5 / 127 + 2e-3, "q4": 1 / 8 + 2e-3}[form]
        assert (np.abs(x[:, b] - y[:, b]) <= step * most + 127 * 2.0**-25 * (most > 0)).all()


@pytest.mark.parametrize("form", specache.FAR_FORMATS)
def test_random_bytes_of_far_rows_decode_alike(lib: Any, form: str) -> None:
    for head in HEADS:
        far = np.random.default_rng(head).integers(0, 256, (50, specache.far_row_bytes(form, head)), np.uint8)
        with np.errstate(all="ignore"):
            want = specache.far_decode(form, far, head)
        got = kernels.far_decode(lib, form, far, head)
        nan = np.isnan(want)
        assert np.array_equal(np.isnan(got), nan) and np.array_equal(got[~nan], want[~nan])


def test_sizes_of_far_rows_are_what_the_format_says(lib: Any) -> None:
    assert [specache.far_row_bytes(f, 128) for f in specache.FAR_FORMATS] == [256, 136, 72]
    assert [specache.far_row_bytes(f, 40) for f in specache.FAR_FORMATS] == [96, 72, 40]
    for bad in ((3, 64), (-1, 64), (0, 0), (0, 1025)):
        assert lib.kvq_far_row_bytes(*bad) == 0
    rows = np.zeros((1, 64), np.float16)
    with pytest.raises(MethodError):
        native.check(lib, lib.kvq_far_encode(7, 64, 1, rows.ctypes.data, rows.ctypes.data))


# ------------------------------------------------------------------ attention


@dataclass(frozen=True)
class Case:
    name: str
    near: str = "affine"  # affine, lattice
    bits: tuple[int, int] = (2, 2)
    group: int = 32  # of lattice blocks: channels of an index
    u8: int = 0
    dk: int = 64
    dv: int = 64
    n_head_kv: int = 2
    gqa: int = 4
    n_q: int = 1
    n_kv: int = 250
    top: int = 16
    far: str = "f16"
    fetch: str = "now"
    mask: str = "causal"  # none, causal, holes, heads
    softcap: float = 0.0
    max_bias: float = 0.0
    sinks: bool = False
    f32: bool = True
    kept: str = "good"  # what ahead is given: good, stale, none
    room: int = 2  # rows that are kept, times top

    @property
    def n_head(self) -> int:
        return self.n_head_kv * self.gqa

    @property
    def page(self) -> int:
        return 32 if self.near == "lattice" else max(32, self.group)

    def codec(self, role: int) -> Codec:
        d, bits = (self.dk, self.dv)[role], self.bits[role]
        if self.near == "lattice":
            return Codec(LATTICE, role, bits, self.group, self.u8, 0, 0.0, self.page, d)
        group = self.group if role == K else min(self.group, d)
        return Codec(AFFINE, role, bits, group, self.u8, 0, (0.0, 0.25, 0.0)[bits], self.page, d)


def cases() -> list[Case]:
    nears: list[dict[str, Any]] = [
        *({"near": "affine", "group": g, "bits": b} for g in (32, 64, 128) for b in ((1, 1), (2, 2), (2, 1))),
        *({"near": "lattice", "group": d, "bits": b} for d, b in ((2, (1, 1)), (4, (1, 1)), (8, (1, 1)))),
        *({"near": "lattice", "group": d, "bits": b} for d, b in ((2, (2, 2)), (4, (2, 2)), (4, (2, 1)))),
    ]
    heads = [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (128, 64)]
    cycle: dict[str, list[Any]] = {
        "u8": [0, 1],
        "n_kv": [250, 129, 256, 383, 70],
        "top": [16, 64, 1, 3, 0, 5000, 32],
        "far": ["f16", "q8", "q4", "f16"],
        "mask": ["causal", "holes", "none", "heads"],
        "softcap": [0.0, 0.0, 30.0],
        "max_bias": [0.0, 0.0, 8.0],
        "sinks": [False, True],
        "fetch": ["now", "now", "ahead", "all"],
        "kept": ["good", "stale", "none"],
        "room": [1, 2, 4],
    }
    out = []
    for i, (near, n_q) in enumerate(itertools.product(nears, (1, 2, 5, 40))):
        rng = np.random.default_rng(1000 + i)
        picked = {key: values[rng.integers(len(values))] for key, values in cycle.items()}
        dk, dv = heads[rng.integers(len(heads))]
        gqa = (1, 3, 4, 8)[rng.integers(4)]
        out.append(Case(f"sweep {i}", dk=dk, dv=dv, gqa=gqa, n_q=n_q, **near, **picked))
    base = Case("one")
    for fetch, top in itertools.product(("now", "ahead"), (0, 1, 64, 5000)):
        out.append(replace(base, name=f"{fetch} {top}", fetch=fetch, top=top, n_q=3, near="lattice", group=2))
    for kept, room in itertools.product(("good", "stale", "none"), (1, 3)):
        out.append(replace(base, name=f"ahead of {kept} {room}", fetch="ahead", kept=kept, room=room, n_q=2, n_kv=260))
    out += [
        replace(base, name="falcon", n_head_kv=1, gqa=71, n_q=2, top=64),
        replace(base, name="falcon, five tokens", n_head_kv=1, gqa=71, n_q=5, near="lattice", group=2, far="q8"),
        replace(base, name="falcon ahead", n_head_kv=1, gqa=71, n_q=3, fetch="ahead", mask="heads"),
        replace(base, name="long", n_kv=4100, top=128, n_head_kv=1, near="lattice", group=2, dk=128, dv=128),
        replace(base, name="long, many picks", n_kv=4100, top=1000, n_head_kv=1, gqa=2, n_q=2, group=64),
        replace(base, name="40 tokens a head", n_q=40, mask="heads", sinks=True, top=8),
        replace(base, name="all, many pages", fetch="all", far="q4", n_kv=2500, n_q=40, sinks=True, gqa=2),
        replace(base, name="all, one token", fetch="all", n_q=1, far="f16", softcap=20.0, max_bias=4.0),
    ]
    return out + [replace(c, name=c.name + ", folded", f32=False) for c in out[::3]]


CASES = cases()


@dataclass
class Built:
    """near, far: keys and values [n_head_kv, n_cells, d]; candidates bool [n_cells]."""

    case: Case
    q: np.ndarray
    mask: np.ndarray | None
    sinks: np.ndarray | None
    pages: list[kernels.Page]
    rows: list[tuple[np.ndarray | None, np.ndarray | None]]
    near: tuple[np.ndarray, np.ndarray]
    far: tuple[np.ndarray, np.ndarray]
    candidates: np.ndarray
    kept: np.ndarray  # that ahead is given

    def slot_mask(self) -> np.ndarray:
        c = self.case
        m = np.full((c.n_q, 1 if self.mask is None else self.mask.shape[1], self.candidates.size), -np.inf)
        m[:, :, : c.n_kv] = 0 if self.mask is None else self.mask
        return np.where(np.isnan(self.near[0][0, :, 0]), -np.inf, m)  # cells that were never written

    def stream(self, dst: np.ndarray) -> kernels.Stream:
        c = self.case
        far = kernels.Far(c.fetch, c.top, c.far, c.page, self.rows, self.kept.copy(), np.zeros(4, np.uint64))
        return kernels.Stream(
            c.codec(K), c.codec(V), c.n_head_kv, c.n_kv, self.pages, self.q, dst, c.dk**-0.5, self.mask, c.max_bias,
            c.softcap, self.sinks, kernels.F32 if c.f32 else 0, far,
        )  # fmt: skip

    def dst(self) -> np.ndarray:
        return np.full((self.case.n_q, self.case.n_head, self.case.dv), np.nan, np.float32)


def masked(c: Case, rng: np.random.Generator) -> np.ndarray | None:
    if c.mask == "none":
        return None
    shape = (c.n_q, c.n_head if c.mask == "heads" else 1, c.n_kv)
    m = (-rng.uniform(0, 2, shape) if c.max_bias else np.zeros(shape)).astype(np.float16)
    last = c.n_kv - c.n_q + np.arange(c.n_q)[:, None, None]
    m = np.where(np.arange(c.n_kv) > last, -np.inf, m)
    if c.mask in ("holes", "heads"):
        m = np.where(rng.random(shape) < 0.4, -np.inf, m)
    return np.ascontiguousarray(m.astype(np.float16))


def build(lib: Any, c: Case) -> Built:
    """Pages: most of both tiers; of five, one open, one with open values, one sealed without far rows; some empty."""
    rng = np.random.default_rng(zlib.crc32(c.name.removesuffix(", folded").encode()))
    n_pages = -(-c.n_kv // c.page) + 1  # the last one lies behind n_kv
    n = n_pages * c.page
    near, far = ([np.zeros((c.n_head_kv, n, d)) for d in (c.dk, c.dv)] for _ in range(2))
    candidates = np.zeros(n, bool)
    pages: list[kernels.Page] = []
    rows: list[tuple[np.ndarray | None, np.ndarray | None]] = []
    for p in range(n_pages):
        at, kind = slice(p * c.page, (p + 1) * c.page), rng.choice(9) if p else 8
        if kind == 0:  # no cell was ever written
            pages.append(kernels.Page(None, None, 0, at.start))
            rows.append((None, None))
            near[0][:, at] = near[1][:, at] = np.nan
            continue
        lanes: list[Any] = []
        mine: list[Any] = []
        for role, d in ((K, c.dk), (V, c.dv)):
            codec = c.codec(role)
            x = rng.normal(size=(c.n_head_kv, c.page, d)) + (0.5 if role == V else 0)
            x *= np.exp(0.5 * rng.normal(size=d)) if role == K else 1
            x = x.astype(np.float16)
            if kind == 1 or (kind == 2 and role == V):
                tile = np.zeros((c.n_head_kv, c.page, -(-d // 16) * 16), np.float16)
                tile[:, :, :d] = x
                lanes.append(tile)
                near[role][:, at] = x
            else:
                blocks = [kernels.encode(lib, codec, head) for head in x]
                lanes.append(tuple(np.stack(b) for b in zip(*blocks)))
                near[role][:, at] = [ref.decode(codec, *b) for b in blocks]
            coded = [specache.far_encode(c.far, head) for head in x]
            far[role][:, at] = [specache.far_decode(c.far, h, d) for h in coded]
            mine.append(np.stack(coded))
        has = kind > 3
        candidates[at] = has
        # rows of pages that are no candidates lie there as well: they are not to be read
        rows.append((mine[0], mine[1]) if kind != 3 else (mine[0], None))
        pages.append(kernels.Page(lanes[0], lanes[1], c.page, at.start))
    order = rng.permutation(n_pages) if c.n_q == 2 else np.arange(n_pages)
    b = Built(
        c,
        rng.normal(size=(c.n_q, c.n_head, c.dk)).astype(np.float32),
        masked(c, rng),
        (2 * rng.normal(size=c.n_head)).astype(np.float32) if c.sinks else None,
        [pages[i] for i in order],
        rows,
        (near[0], near[1]),
        (far[0], far[1]),
        candidates,
        np.full((c.n_head_kv, max(c.room * c.top, 1)), -1, np.int32),
    )
    if c.kept != "none":
        some = np.flatnonzero(candidates[: c.n_kv]) if c.kept == "good" else np.arange(n)
        for h in range(c.n_head_kv):
            k = min(c.room * c.top, len(some), 3 + len(some) // 3)
            b.kept[h, :k] = rng.choice(some, k, replace=False)
    return b


def seen_scores(b: Built) -> np.ndarray:
    """f64 [n_q, n_head_kv, n_cells]"""
    c, mask = b.case, b.slot_mask()
    near = [np.nan_to_num(x) for x in b.near]
    w = attention.weights(attention.logits(b.q, near[0], mask, c.dk**-0.5, c.max_bias, c.softcap), b.sinks)
    return w.reshape(c.n_q, c.n_head_kv, c.gqa, -1).sum(2)


def two_tiers(b: Built, candidates: np.ndarray, top: int, given: list[np.ndarray] | None = None) -> np.ndarray:
    c = b.case
    k, v = (np.nan_to_num(x) for x in b.near)
    out, _ = specache.attend(
        b.q, (k, v), b.far, candidates, top, b.slot_mask(), c.dk**-0.5, c.max_bias, c.softcap, b.sinks, given
    )
    return out


def usable(b: Built) -> list[np.ndarray]:
    """Given cells that are candidates and lie below n_kv."""
    cells = np.arange(b.candidates.size)
    ok = b.candidates & (cells < b.case.n_kv)
    return [np.array([p for p in row if p >= 0 and ok[p]], int) for row in b.kept]


def wanted(b: Built) -> np.ndarray:
    c = b.case
    if c.fetch == "all":
        k, v = (np.where(b.candidates[:, None], f, np.nan_to_num(n)) for f, n in zip(b.far, b.near))
        return attention.attend(b.q, k, v, b.slot_mask(), c.dk**-0.5, c.max_bias, c.softcap, b.sinks)
    return two_tiers(b, b.candidates, c.top, usable(b) if c.fetch == "ahead" else None)


def ties(b: Built, eps: float) -> np.ndarray:
    """bool [n_q, n_head_kv]: cells around the last pick lie within a relative eps, so that rounding decides."""
    c, score = b.case, np.where(b.candidates, seen_scores(b), 0.0)
    if c.fetch != "now" or not 0 < c.top < score.shape[-1]:
        return np.zeros(score.shape[:2], bool)
    order = -np.sort(-score, axis=-1)
    return (order[..., c.top - 1] > 0) & (order[..., c.top - 1] - order[..., c.top] <= eps * order[..., c.top - 1])


def run(lib: Any, b: Built, n_threads: int = 1) -> tuple[np.ndarray, kernels.Far]:
    dst = b.dst()
    stream = b.stream(dst)
    kernels.attend(lib, [stream], n_threads)
    assert stream.far is not None
    return dst, stream.far


@pytest.mark.parametrize("c", CASES, ids=lambda c: c.name)
def test_two_tiers_against_f64(lib: Any, c: Case) -> None:
    """f32 arithmetic: 1e-4 of the values' size. Folded: near products in 8-bit steps, as one tier has them."""
    b = build(lib, c)
    want = wanted(b)
    for n_threads in (1, 2):
        got, _ = run(lib, b, n_threads)
        assert np.isfinite(got).all()
        error = np.abs(got - want)
        if c.f32:
            tied = np.repeat(ties(b, 1e-5), c.gqa, axis=1)
            assert tied.mean() < 0.1
            assert (error[~tied] < 1e-4).all(), error[~tied].max()
            assert (error[tied] < 0.1).all()  # one cell of little weight for another
        else:
            assert np.sqrt((error**2).mean() / (want**2).mean()) < 6e-3


NOW_OR_AHEAD = [c for c in CASES if c.fetch in ("now", "ahead") and c.top > 0]


@pytest.mark.parametrize("c", NOW_OR_AHEAD[::2], ids=lambda c: c.name)
def test_picks_and_counts(lib: Any, c: Case) -> None:
    """Ahead leaves picks behind: candidates in order, whose scores sum to what the best ones have. Behind those of the
    last token are those of the tokens before it, and what was kept before.
    """
    b = build(lib, replace(c, fetch="ahead"))
    score, given = np.where(b.candidates, seen_scores(b), 0.0), usable(b)
    _, far = run(lib, b, 2)
    assert far.kept is not None and far.counts is not None
    fetched = hits = wants = 0
    for h in range(c.n_head_kv):
        best = [specache.picks(score[i, h], b.candidates, c.top) for i in range(c.n_q)]
        mine = far.kept[h, : len(best[-1])]
        assert (np.diff(mine) > 0).all() and b.candidates[mine].all() and (score[-1, h, mine] > 0).all()
        assert score[-1, h, mine].sum() == pytest.approx(score[-1, h, best[-1]].sum(), rel=1e-5 if c.f32 else 5e-3)
        stay, n_kept = given[h], far.kept.shape[1]
        for now in [*best[-max(n_kept // c.top, 1) : -1], mine]:  # one token after the other
            fetched += len(set(now) - set(stay))
            stay = specache.keep(stay, [now], n_kept, c.top)
        assert stay.tolist() == specache.keep(given[h], [*best[:-1], mine], n_kept, c.top).tolist()
        got = far.kept[h].tolist()
        if c.n_q == 1 or c.f32:  # else rounding may decide on picks of tokens that are not the last
            assert got == stay.tolist() + [-1] * (n_kept - len(stay))
        assert len(({*got} ^ {*stay.tolist()}) - {-1}) <= (0 if c.f32 else 2 * c.n_q)
        wants += len(best[0])
        hits += len(set(best[0]) & set(given[h]))
    counts = far.counts.astype(int)
    assert counts[1] == wants and counts[3] == 1
    assert abs(counts[0] - fetched) <= (0 if c.f32 else 2 * c.n_head_kv * c.n_q)
    assert abs(counts[2] - hits) <= (0 if c.f32 else 2 * c.n_head_kv)

    _, far = run(lib, build(lib, replace(c, fetch="now")))
    best = [specache.picks(s, b.candidates, c.top) for s in score.reshape(-1, score.shape[-1])]
    assert far.counts is not None and far.kept is not None
    assert far.counts.astype(int).tolist() == [sum(map(len, best)), sum(map(len, best[: c.n_head_kv])), 0, 1]
    for h in range(c.n_head_kv if c.f32 else 0):  # for a call that reads ahead, as if nothing had been kept
        stay = specache.keep(np.array([], int), best[h :: c.n_head_kv], far.kept.shape[1], c.top)
        assert far.kept[h, : len(stay)].tolist() == stay.tolist() and (far.kept[h, len(stay) :] == -1).all()


SOME = [c for c in CASES if c.fetch == "now" and c.n_q < 40][::4]


@pytest.mark.parametrize("c", SOME, ids=lambda c: c.name)
def test_all_picked_is_exact_and_none_is_the_near_copy(lib: Any, c: Case) -> None:
    all_of_it, none = build(lib, replace(c, top=5000, far="f16")), build(lib, replace(c, top=0))
    exact, _ = run(lib, replace_fetch(all_of_it, "all"))
    got, _ = run(lib, all_of_it)
    assert np.abs(got - exact).max() < (2e-5 if c.f32 else 2e-3)  # folded: what is open is multiplied alike, in f32
    got, _ = run(lib, none)
    stream = none.stream(near := none.dst())
    stream.far = None
    kernels.attend(lib, [stream])
    assert np.abs(got - near).max() < (1e-5 if c.f32 else 2e-3)
    assert np.abs(exact - near).max() > 0.05, "the two tiers hold the same: nothing is tested"


def replace_fetch(b: Built, fetch: str) -> Built:
    return replace(b, case=replace(b.case, fetch=fetch))


def test_a_wrong_pick_is_seen(lib: Any) -> None:
    """What test_two_tiers_against_f64 allows is less than one cell of average weight."""
    for c in SOME:
        if not c.f32 or not 0 < c.top < 100:
            continue
        b = build(lib, c)
        score = np.where(b.candidates, seen_scores(b), 0.0)
        other = [specache.picks(score[0, h], b.candidates, c.top + 1)[1:] for h in range(c.n_head_kv)]
        b = replace(b, q=b.q[:1], mask=None if b.mask is None else b.mask[:1], case=replace(c, n_q=1))
        assert np.abs(two_tiers(b, b.candidates, c.top, other) - two_tiers(b, b.candidates, c.top)).max() > 1e-3


def test_streams_of_one_call_do_not_meet(lib: Any) -> None:
    """With and without a second tier, one and two threads."""
    some = [build(lib, c) for c in CASES[:20]]
    for n_threads in (1, 2):
        alone, together = [b.dst() for b in some], [b.dst() for b in some]
        apart, streams = ([b.stream(d) for b, d in zip(some, to)] for to in (alone, together))
        for s in (apart, streams):
            for x in s[::3]:
                x.far = None
        for x in apart:
            kernels.attend(lib, [x], n_threads)
        kernels.attend(lib, streams, n_threads)
        for one, other in zip(alone, together):
            assert np.abs(one - other).max() < 1e-4
        for x, y in zip(apart, streams):
            if x.far is not None and y.far is not None:
                for left, right in ((x.far.kept, y.far.kept), (x.far.counts, y.far.counts)):
                    assert (left is None) == (right is None)
                    assert left is None or right is None or np.array_equal(left, right)


def test_log_sum_exp_is_that_of_both_tiers(lib: Any) -> None:
    c = replace(CASES[0], fetch="now", top=20, sinks=True, gqa=3, n_q=2, far="f16", mask="causal")
    b = build(lib, c)
    score = np.where(b.candidates, seen_scores(b), 0.0)
    lse = np.zeros((c.n_q, c.n_head), np.float32)
    kernels.attend(lib, [b.stream(b.dst())], lse=lse)
    for i, h in itertools.product(range(c.n_q), range(c.n_head)):
        k = np.nan_to_num(b.near[0]).copy()
        cells = specache.picks(score[i, h // c.gqa], b.candidates, c.top)
        k[:, cells] = b.far[0][:, cells]
        x = attention.logits(b.q, k, b.slot_mask(), c.dk**-0.5)[i, h]
        assert b.sinks is not None
        assert lse[i, h] == pytest.approx(np.log(np.exp(x).sum() + np.exp(b.sinks[h])), abs=1e-4)


@pytest.mark.parametrize(
    ("field", "value"), [("fetch", 4), ("fetch", 0), ("top", -1), ("format", 3), ("n_cells", 64), ("k_rows", None)]
)
def test_an_impossible_second_tier_is_refused_with_a_line(lib: Any, field: str, value: Any) -> None:
    b = build(lib, CASES[0])
    stream = b.stream(b.dst())
    assert stream.far is not None
    far, rows = stream.far.struct()
    setattr(far, field, value)
    stream.far.struct = lambda: (far, rows)  # type: ignore[method-assign]
    with pytest.raises(MethodError, match="second tier"):
        kernels.attend(lib, [stream])


def test_ahead_without_room_for_picks_is_refused(lib: Any) -> None:
    b = build(lib, replace(CASES[0], fetch="ahead"))
    stream = b.stream(b.dst())
    assert stream.far is not None
    for kept in (None, np.full((b.case.n_head_kv, b.case.top - 1), -1, np.int32)):
        stream.far.kept = kept
        with pytest.raises(MethodError, match="second tier"):
            kernels.attend(lib, [stream])


def test_rows_that_were_not_picked_for_the_longest_time_go_first() -> None:
    """By hand. `picked` of the tokens of a step, as many of which stay as have room: two."""
    kept = np.array([], int)
    for picked, want in (
        ([[3, 7]], [3, 7]),
        ([[1, 3]], [1, 3, 7]),
        ([[7, 9]], [7, 9, 1, 3]),
        ([[2, 9]], [2, 9, 7, 1]),
        ([[]], [2, 9, 7, 1]),
        ([[1, 4], [2, 5]], [2, 5, 1, 4]),
        ([[8, 9], [3, 5], [1, 3]], [1, 3, 5, 2]),
        ([[6], []], [6, 1, 3, 5]),
    ):
        kept = specache.keep(kept, [np.array(p, int) for p in picked], 4, 2)
        assert kept.tolist() == want
