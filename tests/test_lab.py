"""The laboratory: what a class is given, what comes of what it gives back, the built-in methods as classes, eviction,
errors of a user's code, and the commands.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_sliding_windows
from ggml_kvq import Model, cli
from ggml_kvq.calibrate import capture
from ggml_kvq.errors import LabError, MethodError, StateError
from ggml_kvq.evaluate import results
from ggml_kvq.lab import Cells, Decoded, Method, Page, gaussian, hadamard, lattice, load, nearest, trellis
from ggml_kvq.lab.method import sources
from ggml_kvq.lab.page import check_bits, check_levels

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "lab"
TEXT = (ROOT / "tests" / "data" / "manual.md").read_text(encoding="utf-8")
SAMPLE = 6400  # characters: 2048 tokens and some
N = 480


class Same(Method):
    """Rows as they came; notes what it was given."""

    turned: bool = True
    window: int = 32

    def __post_init__(self) -> None:
        self.seen: list[Page] = []

    def seal(self, page: Page) -> Decoded:
        queries = page.queries if self.wants_queries else None
        rows = page.keys.copy(), page.values.copy(), page.keys_before, page.before, queries
        self.seen.append(page)
        page.kept = rows  # type: ignore[attr-defined]
        if self.turned:
            return Decoded(page.keys, page.values, bits=16)
        return Decoded(keys_before=page.keys_before, values=page.values, bits=16)


def logits(path: Path, n: int = N, n_ubatch: int = 48, **kwargs: Any) -> np.ndarray:
    with Model(path, n_ctx=512, n_batch=n_ubatch, n_ubatch=n_ubatch, n_threads=2, **kwargs) as model:
        return model.logits(model.tokenize(TEXT)[:n])


def of(path: Path, method: Method | str, **kwargs: Any) -> np.ndarray:
    return logits(path, kv_method="lab", lab=method, **kwargs)


def kld(ref: np.ndarray, other: np.ndarray) -> float:
    """Mean divergence over the second half."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x[len(x) // 2 :].astype(np.float64)
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    a, b = log_softmax(ref), log_softmax(other)
    return float((np.exp(a) * (a - b)).sum(-1).mean())


@pytest.fixture(scope="module")
def exact(demo_model: Path) -> np.ndarray:
    return logits(demo_model, kv_method="f16")


# ------------------------------------------------------------------ rows


def test_rows_given_back_as_they_came_change_nothing(demo_model: Path, exact: np.ndarray) -> None:
    assert np.array_equal(of(demo_model, Same()), exact)
    assert np.array_equal(logits(demo_model, kv_method="lab"), exact)  # without a class
    # turned back and again: f16 rounds twice
    assert kld(exact, of(demo_model, Same(turned=False))) < 1e-6


def test_a_page_is_what_the_model_wrote(demo_model: Path) -> None:
    """Against rows that calibration captures, which come another way; and the layer before as it was decoded."""

    class Half(Same):
        def seal(self, page: Page) -> Decoded:
            super().seal(page)
            return Decoded(page.keys / 2, page.values / 4, bits=16)

    method = Half()
    with Model(demo_model, "lab", lab=method, n_ctx=512, n_ubatch=64, n_threads=2) as model:
        ids = model.tokenize(TEXT)[:256]
        first = method.seen
        for _ in model.feed(np.asarray(ids, np.int32)[:64], n_ubatch=64):
            pass
    shapes = capture.layers(demo_model)
    with capture.open_model(demo_model, 64, 2) as model:
        capture.run(model, np.asarray(ids[:64], np.int32))
        il, heads, size_k, size_v = shapes[0]
        keys = capture.rows(model, il, False, 0, 64, heads * size_k).reshape(2, 32, heads, size_k)
        values = capture.rows(model, il, True, 0, 64, heads * size_v).reshape(2, 32, heads, size_v)
    assert {p.layer for p in first} == set(range(len(shapes))) and all(p.stream == 0 for p in first)
    page = next(p for p in first if p.layer == 0)
    n = len(page.numbers)
    assert page.numbers == list(range(n)) and n >= 1
    assert page.positions.tolist() == np.arange(32 * n).reshape(n, 32).tolist() and page.valid.all()
    k, v, before_turning, before, _ = page.kept  # type: ignore[attr-defined]
    assert before is None and page.layer_before is None
    assert np.allclose(before_turning, keys[:n], atol=2e-2) and np.allclose(v, values[:n], atol=2e-3)
    assert not np.allclose(k, before_turning, atol=0.1)
    later = next(p for p in first if p.layer == 1)
    b = later.kept[3]  # type: ignore[attr-defined]
    assert later.layer_before == 0 and np.allclose(b.keys, k / 2, atol=1e-3) and np.allclose(b.values, v / 4, atol=1e-3)
    assert np.allclose(b.keys_before, before_turning / 2, atol=1e-2)


def test_queries_are_those_that_calibration_observes(demo_model: Path) -> None:
    class Asks(Same):
        wants_queries = True
        window: int = 0

    method = Asks()
    with Model(demo_model, "lab", lab=method, n_ctx=512, n_ubatch=64, n_threads=2) as model:
        ids = np.asarray(model.tokenize(TEXT)[:64], np.int32)
        for _ in model.feed(ids):
            pass
        heads, size = method.seen[0].keys.shape[2:]
        with Model(demo_model, "f16", n_ctx=512, n_ubatch=64, n_threads=2) as other, capture.observed_queries(other):
            for _ in other.feed(ids):
                pass
            want = capture.queries(other, 0, heads * size).reshape(heads, size)
    got = method.seen[0].kept[4]  # type: ignore[attr-defined]
    want = want[:, method.seen[0].pairs].mean(-1)
    # calibration leaves the first four tokens out
    assert got.shape == want.shape and np.corrcoef(got.ravel(), want.ravel())[0, 1] > 0.98


def test_several_sequences(demo_model: Path) -> None:
    """Each a stream of the cache, whose pages come with its own number and positions."""
    prompts, method = [TEXT[:500], TEXT[3000:3400]], Same(window=0)
    asked: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 2, "n_threads": 2}
    with Model(demo_model, "f16", **asked) as model:
        texts = model.generate_many(prompts, max_tokens=40, temperature=0)
        lengths = [len(model.tokenize(p, add_bos=True)) for p in prompts]
    with Model(demo_model, "lab", lab=method, **asked) as model:
        assert model.generate_many(prompts, max_tokens=40, temperature=0) == texts
    assert {p.stream for p in method.seen} == {0, 1}
    for stream, n in enumerate(lengths):
        first = [p for p in method.seen if p.stream == stream and p.layer == 0]
        positions = np.concatenate([p.positions.ravel() for p in first])
        assert positions.tolist() == list(range(len(positions))) and len(positions) >= n // 32 * 32


# ------------------------------------------------------------------ the built-in methods as classes


@pytest.mark.parametrize(
    ("example", "method", "opts"),
    [
        ("kivi.py", "kivi", "bits=2"),
        ("kivi.py:Kivi,bits=4", "kivi", "bits=4"),
        ("higgs.py", "higgs", "bits=2,grid=d2"),
        ("xquant.py", "xquant", ""),
        ("aqua.py:Aqua", "aqua", "predictor=bias"),
    ],
)
def test_built_in_methods_as_classes(
    demo_model: Path, exact: np.ndarray, example: str, method: str, opts: str, tmp_path: Path
) -> None:
    config = "none"
    if method == "aqua":
        text, sidecar = tmp_path / "text.txt", tmp_path / "means.gguf"
        text.write_text(TEXT[:SAMPLE])  # four sequences: both see all of it
        args = ["calibrate", "-m", str(demo_model), "-o", str(sidecar), "-f", str(text)]
        assert cli.main([*args, "--predictor", "bias", "--sequences", "4", "--length", "512"]) == 0
        example, config = f"{example},text={text}", str(sidecar)
    native = logits(demo_model, kv_method=method, kv_opts=f"{opts},precision=f32".strip(","), kv_config=config)
    ours, theirs = kld(exact, of(demo_model, f"{EXAMPLES / example}")), kld(exact, native)
    assert theirs > 1e-3 and abs(ours / theirs - 1) < 0.05, f"{ours:.5f} against {theirs:.5f}"


def test_declared_bits_are_those_of_the_built_in(demo_model: Path) -> None:
    found = []
    for kwargs in ({"kv_method": "kivi"}, {"kv_method": "lab", "lab": f"{EXAMPLES / 'kivi.py'}"}):
        with Model(demo_model, n_ctx=512, n_ubatch=64, n_threads=2, **kwargs) as model:  # type: ignore[arg-type]
            model.logits(model.tokenize(TEXT)[:300])
            found.append(model.kv_stats())
    assert found[1]["simulated"] and found[1]["method"] == "lab" and found[1]["n_sealed"] == found[0]["n_sealed"]
    for key in ("bits", "bits_k", "bits_v"):
        assert abs(found[0][key] - found[1][key]) < 0.02, key


# ------------------------------------------------------------------ cells that go


def test_pairs_that_a_sliding_window_cuts(tmp_path: Path) -> None:
    """XQuant's class looked for codes of the layer below, which lies in another cache and holds other cells."""
    model = test_sliding_windows.gemma3(ROOT / "models" / "kvq-demo-q8_0.gguf", tmp_path / "windows.gguf", 3)
    lab = load(f"{EXAMPLES / 'xquant.py'}:XQuant")
    with Model(model, "lab", lab=lab, n_ctx=1536, n_batch=64, n_ubatch=64, n_threads=2, swa_full=False) as m:
        assert np.isfinite(m.logits(m.tokenize(TEXT)[:1200])).all()


def test_evicted_cells_are_read_by_nobody(demo_model: Path, exact: np.ndarray) -> None:
    """Cells that go as they seal may hold anything; those that stay are read."""

    class Kept(Same):
        window: int = 0
        fill: float = 0.0

        def seal(self, page: Page) -> Decoded:
            if self.fill:
                return Decoded(page.keys * 0 + self.fill, page.values * 0 + self.fill, bits=0)
            return Decoded(page.keys, page.values, bits=16)

        def scores(self, cells: Any) -> np.ndarray:
            assert np.allclose(cells.probabilities.sum(1), 1, atol=1e-3)  # of each head, what is held
            assert not cells.probabilities[~cells.held].any()
            out: np.ndarray = cells.scores + 1
            return out

    assert np.array_equal(of(demo_model, Kept()), exact)
    gone = of(demo_model, Kept(keep=0.0, sinks=32))
    assert np.array_equal(gone, of(demo_model, Kept(keep=0.0, sinks=32, fill=3.0))) and kld(exact, gone) > 0.01
    half = [of(demo_model, Kept(keep=0.5, sinks=32, fill=fill)) for fill in (0.0, 3.0)]
    assert not np.array_equal(half[0], half[1]) and kld(exact, half[0]) < kld(exact, gone)


def test_share_held_is_what_keep_says(demo_model: Path) -> None:
    with Model(demo_model, "lab", lab=f"{EXAMPLES / 'evict.py'}:H2o,keep=0.25", n_ctx=512, n_ubatch=64) as model:
        model.logits(model.tokenize(TEXT)[:480])
        stats = model.kv_stats()
    assert abs(stats["share_held"] - 0.25) < 0.03
    size = 16 * stats["share_held"]
    assert size < stats["bits_no_window"] < 1.3 * size  # and the number of each cell


# ------------------------------------------------------------------ codecs


@pytest.mark.parametrize(
    ("decode", "bits", "most"),
    [
        (lambda x: nearest(x, gaussian(1)), 1, 0.3640),  # Max 1960: 0.3634
        (lambda x: nearest(x, gaussian(2)), 2, 0.1185),  # 0.1175
        (lambda x: nearest(x, gaussian(3)), 3, 0.0350),  # 0.03454
        (lambda x: nearest(x, gaussian(4)), 4, 0.0097),  # 0.009497
        (lambda x: lattice(x, 2), 2, 0.1085),
        (lambda x: trellis(x, 2, 2), 2, 0.096),  # Marcellin and Fischer, doubled alphabet: 0.099
        (lambda x: trellis(x, 2, 8), 2, 0.079),  # 0.0739 with optimised levels
        (lambda x: trellis(x, 3, 8), 3, 0.0215),
    ],
)
def test_error_of_a_unit_gaussian(decode: Any, bits: int, most: float) -> None:
    x = np.random.default_rng(3).normal(size=(400, 64)).astype(np.float32)
    error = float(np.square(x - decode(x)).mean())
    assert 4.0**-bits < error < most  # not below Shannon's bound


def test_hadamard_is_its_own_inverse() -> None:
    x = np.random.default_rng(4).normal(size=(3, 96)).astype(np.float32)
    assert np.allclose(hadamard(hadamard(x)), x, atol=1e-5) and not np.allclose(hadamard(x), x)


def test_a_path_of_the_trellis_is_one_that_a_decoder_walks() -> None:
    """A coarse count: 1 bit a value and the first state tell all paths of four values apart, so a row of four values
    has at most 4 * 2^4 different decodings.
    """
    x = np.random.default_rng(5).normal(size=(20000, 4)).astype(np.float32)
    assert len(np.unique(trellis(x, 1, 2), axis=0)) <= 4 * 2**4 < len(np.unique(nearest(x, gaussian(2)), axis=0))


# ------------------------------------------------------------------ errors of a user's code

BAD = {
    "return Decoded(page.keys[..., 1:], page.values, bits=2)": "keys have the shape",
    "return Decoded(page.keys * np.nan, page.values, bits=2)": "f16 holds finite numbers",
    "return Decoded(page.keys * 1e6, page.values, bits=2)": "f16 holds finite numbers",
    "return Decoded(page.keys, page.values, bits=2)": "% of the keys came back as they were",
    "return Decoded(page.keys * 0.9, page.values * 0.9, bits=float('nan'))": "is not within 0..32",
    "return Decoded(page.keys * 0.9, page.values * 0.9, bits=-1)": "is not within 0..32",
    "return Decoded(page.keys * 0.9, page.values * 0.9, bits='two')": "is no number",
    "return Decoded(page.keys * 0.9, page.values * 0.9, bits=2, key_levels=(4, 32, 1))": "distinct values",
    "return Decoded(page.keys * 0.9, page.values * 0.9)": "no bits came back",
    "page.queries": "write wants_queries = True",
    "return Decoded(values=page.values, bits=2)": "no keys came back",
    "return page.keys": "gave a ndarray back",
    "return page.no_such_thing": "AttributeError",
    "page.keys[:] = 0": "read-only",
    "return 1 / 0": "ZeroDivisionError",
}


def write(path: Path, body: str, name: str = "Mine") -> Path:
    path.write_text(
        "import numpy as np\nfrom ggml_kvq.lab import Decoded, Method\n\n\n"
        f"class {name}(Method):\n    window: int = 32\n\n    def seal(self, page):\n{textwrap.indent(body, ' ' * 8)}\n"
    )
    return path


@pytest.mark.parametrize("body", list(BAD))
def test_bad_code_gets_one_line_and_ends_the_run(demo_model: Path, tmp_path: Path, body: str) -> None:
    file = write(tmp_path / "mine.py", body)
    with Model(demo_model, "lab", lab=str(file), n_ctx=512, n_ubatch=64, n_threads=2) as model:
        ids = model.tokenize(TEXT)[:200]
        with pytest.raises(LabError) as e:
            model.logits(ids)
        line = str(e.value)
        assert BAD[body] in line and "\n" not in line
        # file, line, class, layer, pages and shapes
        assert line.startswith(("mine.py:8: Mine, layer 0, page", "mine.py:9: Mine, layer 0, page"))
        assert "of sequence 0, keys (" in line and "values (" in line
        with pytest.raises(LabError):  # nothing goes on with rows that are none of the method's
            model.logits(ids)


def test_bad_scores_are_refused(demo_model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "mine.py", "return Decoded(page.keys, page.values, bits=16)")
    file.write_text(file.read_text() + "\n    def scores(self, cells):\n        return cells.probabilities[:, 1:]\n")
    with (
        Model(demo_model, "lab", lab=str(file), n_ctx=512, n_ubatch=64) as model,
        pytest.raises(LabError, match=r"mine.py:\d+: Mine, layer 0, .* cells of sequence 0: scores have the shape"),
    ):
        model.logits(model.tokenize(TEXT)[:200])


def test_levels_and_bits_are_checked_against_rows() -> None:
    rows = np.tile(np.array([1, 2, 3, 4], np.float32), (1, 32, 1, 4))
    check_levels(rows, (4, 32, 16), "key_levels")
    check_levels(rows, (1, 32, 1), "key_levels")
    for levels in ((3, 32, 16), (1, 32, 2)):
        with pytest.raises(ValueError, match="distinct values"):
            check_levels(rows, levels, "key_levels")
    check_bits(rows, rows, 8, "keys")
    check_bits(rows, rows * np.float32(0.99), 0.1, "keys")
    with pytest.raises(ValueError, match="100 %"):
        check_bits(rows, rows, 7, "keys")


@pytest.mark.parametrize(("tokens", "what"), [(200, "prompt"), (1, "token")])
def test_an_endless_loop_ends_at_ctrl_c(demo_model: Path, tmp_path: Path, tokens: int, what: str) -> None:
    """In a prompt, and in a step of one token, where nothing else would hear of it."""
    body = "print('sealing', flush=True)\nwhile len(page.numbers) == 1 or page.layer >= 0:\n    pass"
    file = write(tmp_path / "mine.py", body)
    call = textwrap.dedent(f"""
        import numpy as np
        from ggml_kvq import Model
        with Model({str(demo_model)!r}, "lab", lab={str(file)!r}, n_ctx=512, n_ubatch=64, n_threads=2) as m:
            ids = np.asarray(list(range(5, 205)), np.int32)
            for part in m.feed(ids, n_ubatch={tokens}):
                pass
    """)
    child = subprocess.Popen([sys.executable, "-c", call], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "sealing\n"
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    begin = time.monotonic()
    _, err = child.communicate(timeout=60)
    assert time.monotonic() - begin < 5 and child.returncode != 0
    assert "KeyboardInterrupt" in err.strip().splitlines()[-1]


# ------------------------------------------------------------------ names and options


def test_options_are_the_fields(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.py", "return Decoded(page.keys, page.values, bits=16)")
    file.write_text(file.read_text().replace("    window: int = 32\n", "    bits: int = 2\n    on: bool = False\n"))
    method = load(f"{file}:Mine,bits=3,on=true,window=64")
    assert (method.bits, method.on, method.window) == (3, True, 64)  # type: ignore[attr-defined]
    assert method.describe() == "Mine window=64 bits=3 on=True"
    for text, needle in {
        f"{file}:Mine,bit=3": "no option 'bit'",
        f"{file}:Mine,bits=x": "bits=x is no int",
        f"{file}:Mine,on=perhaps": "on=perhaps is no bool",
        f"{file}:Mine,bits": "write bits=VALUE",
        f"{file}:Mine,keep=2": "keep=2.0 is not within 0..1",
        f"{file}:Other": "no class 'Other'",
        f"{tmp_path / 'none.py'}": "is not a file",
    }.items():
        with pytest.raises(MethodError) as e:
            load(text)
        assert needle in str(e.value) and "\n" not in str(e.value)
    (tmp_path / "broken.py").write_text("x = 1\nclass :\n")
    with pytest.raises(MethodError, match=r"broken.py:2: SyntaxError"):
        load(str(tmp_path / "broken.py"))


IGNORED = {
    "class Mine(Method):\n    bits: int = 2": "has no seal(page)",
    "class Mine(Method):\n    bits: int\n    def seal(self, page): ...": "mine.py:3: option bits of Mine",
    "class Mine(Method):\n    some: list = []\n    def seal(self, page): ...": "option some of Mine needs a default",
    "class Mine(Method):\n    wants_querries = True\n    def seal(self, page): ...": "did you mean wants_queries?",
    "class Mine(Method):\n    def seal(self, page): ...\n    def score(self, cells): ...": "did you mean scores?",
    "class Mine(Method):\n    keep: float = 0.5\n    def seal(self, page): ...": "keep=0.5 needs scores(cells)",
    "class Mine(Method):\n    n_observed = 'all'\n    def seal(self, page): ...": "n_observed='all' is no number",
    "class Mine(Method):\n    def seal(self, page): ...\n    def __post_init__(self): 1 / 0": "ZeroDivisionError",
    "class Mine:\n    def seal(self, page): ...": "write class Mine(Method)",
    "class Mine(Method):\n    def seal(self, page) ...": "mine.py:4: SyntaxError: expected ':'",
}


@pytest.mark.parametrize("text", list(IGNORED))
def test_what_a_class_would_lose_in_silence_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"from ggml_kvq.lab import Method\n\n{text}\n")
    with pytest.raises(MethodError) as e:
        load(f"{file}:Mine")
    assert IGNORED[text] in str(e.value) and "\n" not in str(e.value)


def test_options_of_the_base_need_no_type(demo_model: Path, tmp_path: Path) -> None:
    """window = 64 without a type was measured with 128 in silence, and keep = 0.5 let nothing go."""
    head = "from ggml_kvq.lab import Method\nclass Mine(Method):\n    {}\n    def seal(self, page): ...\n"
    file = tmp_path / "mine.py"
    file.write_text(head.format("window = 64\n    keep = 0\n    def scores(self, cells): ..."))
    mine = load(f"{file}:Mine")
    assert (mine.window, mine.keep) == (64, 0) and mine.native_options() == "window=64,sinks=0,page=32"
    assert load(f"{file}:Mine", {"keep": "0.5"}).keep == 0.5
    for bad in ('window = "auto"', "page = 48.5", "sinks = True"):
        file.write_text(head.format(bad))
        with pytest.raises(MethodError, match=bad.split()[0]):
            load(f"{file}:Mine")


@pytest.mark.parametrize("bad", ["-5000000", "float('nan')", "'many'", "np.zeros(2)"])
def test_bytes_of_tables_are_a_number(tmp_path: Path, bad: str) -> None:
    """A table had -18 bits a value, or ended in a traceback."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\nfrom ggml_kvq.lab import Method\nclass Mine(Method):\n    def __post_init__(self):\n"
        f"        self.table_bytes = {bad}\n    def seal(self, page): ...\n"
    )
    with pytest.raises(MethodError, match="table_bytes"):
        load(f"{file}:Mine")


def test_an_option_without_a_type_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from ggml_kvq.lab import Method\nclass Mine(Method):\n    bits = 2\n    def seal(self, page): ...\n"
    )
    with pytest.raises(MethodError, match="bits has no type, write bits: int"):
        load(f"{file}:Mine,bits=3")


def test_rows_know_the_files_that_a_class_is_made_of(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("import deeper\nBITS = 2\n")
    (tmp_path / "deeper.py").write_text("import numpy\n")
    (tmp_path / "other.py").write_text("")
    file = tmp_path / "mine.py"
    file.write_text("from helper import BITS\n")
    assert [p.name for p in sources(file)] == ["deeper.py", "helper.py", "mine.py"]
    before = results.fingerprint_all(sources(file))
    (tmp_path / "helper.py").write_text("import deeper\nBITS = 4\n")
    assert results.fingerprint_all(sources(file)) != before
    file.write_text("import numpy\n")
    assert results.fingerprint_all(sources(file)) == results.fingerprint(file)


def test_h2o_weighs_every_query_alike(demo_model: Path) -> None:
    """A prompt of 300 tokens and one token behind it: sums of attention, whatever the batches were."""
    found: list[float] = []

    class Sum(Method):
        n_observed = 4096

        def seal(self, page: Page) -> Decoded:
            return Decoded(page.keys, page.values, bits=16)

        def scores(self, cells: Cells) -> np.ndarray:
            out: np.ndarray = cells.scores + cells.n_queries * cells.probabilities
            if cells.layer == 0:
                found.append(float(out[0].sum()))
            return out

    with Model(demo_model, "lab", lab=Sum(), n_ctx=512, n_batch=512, n_ubatch=512, n_threads=2) as model:
        ids = model.tokenize(TEXT)[:302]
        for at in (ids[:300], ids[300:301], ids[301:]):
            list(model.feed(np.asarray(at, np.int32)))
    assert found[-1] == pytest.approx(302, rel=0.01)


def test_what_goes_with_a_laboratory(demo_model: Path, tmp_path: Path) -> None:
    with pytest.raises(MethodError, match="kv_method='lab'"):
        Model(demo_model, "kivi", lab=Same())
    with pytest.raises(MethodError, match="pass Same"):
        Model(demo_model, "lab", "window=64", lab=Same())
    with pytest.raises(MethodError, match="keep=0.5 needs scores"):
        Model(demo_model, "lab", lab=Same(keep=0.5))
    with pytest.raises(MethodError, match="page=48"):
        Model(demo_model, "lab", lab=Same(page=48))
    with Model(demo_model, "lab", lab=Same(), n_ctx=512) as model:
        assert "simulated: f16 rows, as Same leaves them" in model.load_line
        for call in (model.save_state, model.load_state):
            with pytest.raises(StateError, match="simulated"):
                call(tmp_path / "state.bin")


def test_models_come_and_go(demo_model: Path) -> None:
    """Each with a class of its own, side by side, none of which is called when its model is closed."""
    a, b = Same(), Same()
    with Model(demo_model, "lab", lab=a, n_ctx=256) as one, Model(demo_model, "lab", lab=b, n_ctx=256) as two:
        one.logits(one.tokenize(TEXT)[:100])
        assert a.seen and not b.seen
        two.logits(two.tokenize(TEXT)[:100])
    n = len(a.seen), len(b.seen)
    with Model(demo_model, "lab", n_ctx=256) as plain:
        plain.logits(plain.tokenize(TEXT)[:100])
        assert "as they came: no class was given" in plain.load_line
    assert (len(a.seen), len(b.seen)) == n


def test_examples_are_short_and_load() -> None:
    for path in sorted(EXAMPLES.glob("*.py")):
        tree = ast.parse(path.read_text())
        lines = path.read_text().splitlines()
        doc = {
            i
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            for i in range(node.lineno, (node.end_lineno or 0) + 1)
        }
        code = [x for i, x in enumerate(lines, 1) if i not in doc and x.strip() and not x.strip().startswith("#")]
        assert len(code) <= 40, f"{path.name}: {len(code)} lines"
        assert ast.get_docstring(tree), path.name


# ------------------------------------------------------------------ commands


def test_a_new_file_runs_in_eval(demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, text, out = tmp_path / "mine.py", tmp_path / "text.txt", tmp_path / "out.jsonl"
    assert cli.main(["lab", "new", str(file)]) == 0
    assert cli.main(["lab", "new", str(file)]) == 2 and "is there already" in capsys.readouterr().err
    text.write_text(TEXT)
    args = ["eval", "-m", str(demo_model), "-f", str(text), "-c", "512", "--chunks", "1", "-o", str(out), "--quiet"]
    specs = [f"mine=lab:{file}:Mine,bits=3,window=64", f"lab:{EXAMPLES / 'kivi.py'}", "kivi:bits=2"]
    assert cli.main([*args, *(x for s in specs for x in ("--cache", s))]) == 0
    table = capsys.readouterr().out
    assert "mine (simulated)" in table and f"lab:{EXAMPLES / 'kivi.py'} (simulated)" in table
    rows = {r["key"]["cache"]: r for r in map(json.loads, out.read_text().splitlines())}
    mine = rows["mine (simulated)"]
    assert mine["simulated"] and mine["method"] == "lab" and mine["key"]["lab_hash"] and "bits=3" in mine["options"]
    assert "simulated" not in rows["kivi:bits=2"] and 0 < mine["kld_mean"] < 1
    assert 3 < mine["bits_no_window"] < 3.8
    # another file under that name is measured anew
    file.write_text(file.read_text().replace("self.bits - 1", "self.bits - 1 ") + "\n# changed\n")
    assert cli.main([*args, "--cache", specs[0]]) == 0
    assert len(out.read_text().splitlines()) == len(rows) + 1


def test_a_class_that_fails_leaves_no_row(demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, text, out = write(tmp_path / "mine.py", "return 1 / 0"), tmp_path / "text.txt", tmp_path / "out.jsonl"
    text.write_text(TEXT)
    args = ["eval", "-m", str(demo_model), "-f", str(text), "-c", "512", "--chunks", "1", "-o", str(out), "--quiet"]
    assert cli.main([*args, "--cache", f"lab:{file}"]) == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert "mine.py:9: Mine, layer 0" in err and "ZeroDivisionError" in err
    assert [json.loads(x)["key"]["cache"] for x in out.read_text().splitlines()] == ["f16"]
    assert os.path.exists(out)
    out.unlink()
    assert cli.main([*args, "--cache", f"lab:{file},page=48"]) == 2  # found before anything is measured
    assert "page=48" in capsys.readouterr().err and not out.exists()
    fits = "from ggml_kvq.lab import Method\nclass Mine(Method):\n    def seal(self, page): ...\n"
    file.write_text(f"{fits}    def fit(self, sample): 1 / 0\n")
    assert cli.main([*args, "--cache", "kivi", "--cache", f"lab:{file}"]) == 2  # not a row beside others
    assert "mine.py:4: Mine.fit: ZeroDivisionError" in capsys.readouterr().err
