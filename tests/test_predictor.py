"""AQUA's linear predictors (AQUA-KV, arXiv 2501.19392, section 3.1): the arithmetic to the bit, calibration, files,
whole models.
"""

from __future__ import annotations

from ctypes import CDLL
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ggml_kvq import Model, gguf_header
from ggml_kvq.calibrate import capture, files, predictors, weights
from ggml_kvq.core import kernels, loader, native
from ggml_kvq.errors import KvqError, MethodError
from ggml_kvq.reference import LATTICE, Codec, K, V, lattice, predictor
from test_aqua import MODEL, TEXT, change


@pytest.fixture(scope="module")
def lib() -> Any:
    return loader.libraries().need_kvq()


# ------------------------------------------------------------------ the arithmetic


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("n_in", "n_out"), [(256, 256), (512, 256), (72, 40), (40, 8), (1024, 16)])
def test_predictions_equal_the_definition_to_the_bit(lib: CDLL, n_in: Any, n_out: Any, bits: int) -> None:
    rng = np.random.default_rng(n_in + bits)
    w = rng.normal(size=(n_out, n_in)).astype(np.float32)
    w[1] = 0
    w[2, :33] *= 1e-7  # steps below f16
    rows = rng.normal(size=(70, n_in)).astype(np.float32)
    rows[3], rows[4], rows[5, 1] = 0, 1e-31, 1e30
    add = rng.normal(size=(70, n_out)).astype(np.float32)
    packed = kernels.pack_weights(lib, w, bits)
    assert np.array_equal(packed.data, predictor.pack(w, bits))
    for n in (70, 1):
        assert np.array_equal(
            kernels.predict(lib, packed, rows[:n], add[:n], 2), predictor.predict(w, bits, rows[:n], add[:n])
        )
    assert np.array_equal(kernels.predict(lib, packed, rows), predictor.predict(w, bits, rows))


@pytest.mark.parametrize(("bits", "tolerance"), [(8, 0.02), (4, 0.1)])
def test_predictions_are_near_the_product_in_f64(lib: CDLL, bits: int, tolerance: Any) -> None:
    """Root mean square of the error over that of the product; 8 bits round weights to 1/63 of their output's
    largest, rows to 1/127.
    """
    rng = np.random.default_rng(0)
    w, rows = rng.normal(size=(128, 512)).astype(np.float32), rng.normal(size=(64, 512)).astype(np.float32)
    want = rows.astype(np.float64) @ w.T.astype(np.float64)
    got = kernels.predict(lib, kernels.pack_weights(lib, w, bits), rows)
    assert np.sqrt(((got - want) ** 2).mean() / (want**2).mean()) < tolerance


def test_bad_shapes_are_refused(lib: CDLL) -> None:
    assert lib.kvq_weights_bytes(0, 16, 8) == 0 and lib.kvq_weights_bytes(16, 16, 5) == 0
    with pytest.raises(MethodError, match="5 bits"):
        native.check(lib, lib.kvq_weights_pack(16, 16, 5, None, None))
    with pytest.raises(MethodError, match="NULL"):
        native.check(lib, lib.kvq_predict(16, 16, 8, None, 1, None, None, None, 1))


def test_a_chain_is_read_with_the_bits_it_was_written_against(lib: CDLL) -> None:
    """Twelve layers: native encode, decode and predict against numpy, and |error|^2 = (1 - explained) * MSE of the
    grid at every depth: a predictor reads what was reconstructed, so errors do not add up
    (AQUA-KV, section 3.1).
    """
    rng = np.random.default_rng(5)
    heads, size, n, depth = 4, 64, 64, 12
    width = heads * size
    codecs = [Codec(LATTICE, role, 2, 2, 1, 0, 0.0, 32, size) for role in (K, V)]
    truth = [rng.normal(size=(n, width)).astype(np.float32) for _ in range(2)]
    seen: list[np.ndarray] = []
    for layer in range(depth):
        w = [rng.normal(size=(width, m)).astype(np.float32) / np.sqrt(m) for m in (width, 2 * width)]
        packed = [kernels.pack_weights(lib, x, 8) for x in (w[0], w[1][:, :width], w[1][:, width:])]
        noise = [rng.normal(size=(n, width)).astype(np.float32) * 0.3 for _ in range(2)]
        k = truth[0] = (truth[0] @ w[0].T if layer else truth[0]) + noise[0]
        v = truth[1] = (np.concatenate([k, truth[1]], 1) @ w[1].T if layer else truth[1]) + noise[1]
        rows: list[Any] = []
        for role, x in ((K, k), (V, v)):
            pred: list[Any] = [np.zeros_like(x)] * 2
            if layer and role == K:
                pred = [kernels.predict(lib, packed[0], seen[0]), predictor.predict(w[0], 8, seen[0])]
            elif layer:
                a = kernels.predict(lib, packed[2], seen[1], kernels.predict(lib, packed[1], rows[0]))
                b = predictor.predict(w[1][:, width:], 8, seen[1], predictor.predict(w[1][:, :width], 8, rows[0]))
                pred = [a, b]
            assert np.array_equal(pred[0], pred[1])
            back = np.zeros_like(x)
            for p in range(n // 32):
                for h in range(heads):
                    at = np.s_[32 * p : 32 * p + 32, h * size : h * size + size]
                    left = (x[at] - pred[0][at]).astype(np.float16)
                    block = kernels.encode(lib, codecs[role], left)
                    want = lattice.encode(codecs[role], left)
                    assert np.array_equal(block[0], want[0]) and np.array_equal(block[1], want[1])
                    decoded = kernels.decode(lib, codecs[role], *block)
                    assert np.array_equal(decoded.view(np.uint16), lattice.decode(codecs[role], *want).view(np.uint16))
                    back[at] = decoded
            rows.append(pred[0] + back)
            assert np.array_equal(kernels.round_trip(lib, codecs[role], x - pred[0]), back)
            left_energy, error = ((x - pred[0]) ** 2).mean(), ((x - rows[-1]) ** 2).mean()
            assert error / left_energy == pytest.approx(0.107, rel=0.06), (layer, role)  # MSE of d=2 n=16
            if layer:
                assert left_energy < 3 * (
                    0.3**2 + 0.107 * 0.3**2
                )  # predicts all but the noise and what the layer before lost
        seen = rows


# ------------------------------------------------------------------ weights


def test_q4_0_rows_are_ggml_s_and_errors_are_made_good() -> None:
    import gguf

    rng = np.random.default_rng(2)
    mix = rng.normal(size=(128, 128)) * np.exp(rng.normal(size=128))
    x = rng.normal(size=(4000, 128)) @ mix
    w = rng.normal(size=(48, 128))
    for raw in (weights.to_q4_0(w), weights.to_q4_0(w, x.T @ x)):
        assert np.array_equal(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_0), weights.to_f32(raw, "q4_0"))
    plain, carried = (
        np.square(x @ (weights.to_f32(r, "q4_0") - w).T).mean()
        for r in (weights.to_q4_0(w), weights.to_q4_0(w, x.T @ x))
    )
    assert carried < 0.6 * plain


def test_q4_0_goes_into_four_bit_predictors_unchanged(lib: CDLL) -> None:
    rng = np.random.default_rng(3)
    w = weights.to_f32(weights.to_q4_0(rng.normal(size=(32, 64))), "q4_0")
    rows = rng.normal(size=(5, 64)).astype(np.float32)
    x8, s = predictor.quantise_rows(rows)
    want = (x8.astype(np.float64) * s[:, None]) @ w.T.astype(np.float64)
    assert np.abs(kernels.predict(lib, kernels.pack_weights(lib, w, 4), rows) - want).max() < 1e-5


def test_permuted_keys_give_the_same_residual() -> None:
    """GGUF interleaves the two halves of a head's rotary pairs (llama.cpp's conversion of Llama models):
    P W P^T on permuted rows, V inputs W P^T.
    """
    from ggml_kvq.calibrate import hf

    rng = np.random.default_rng(4)
    heads, size = 3, 16
    width = heads * size
    order = hf.gguf_order(heads, size, size)
    assert sorted(order) == list(range(width)) and list(order[:4]) == [0, 8, 1, 9]
    k0, k1, v1 = (rng.normal(size=(50, width)) for _ in range(3))
    w, wv = rng.normal(size=(width, width)), rng.normal(size=(width, width))
    assert np.allclose((k1 - k0 @ w.T)[:, order], k1[:, order] - k0[:, order] @ w[np.ix_(order, order)].T)
    assert np.allclose(v1 - k1 @ wv.T, v1 - k1[:, order] @ wv[:, order].T)


# ------------------------------------------------------------------ calibration


class Made:
    """A source of rows that follow known predictors; fold: values from keys of both layers, which
    differ enough there to tell their predictors apart.
    """

    def __init__(
        self, n_layer: int = 4, width: int = 64, noise: float = 0.05, bad_sink: bool = False, fold: bool = False
    ) -> None:
        rng = np.random.default_rng(7)
        self.shapes = [(il, 2, width // 2, width // 2) for il in range(n_layer)]
        self.key, self.fold = ["made", bad_sink, fold], fold
        self.wk = [rng.normal(size=(width, width)) / np.sqrt(width) for _ in range(n_layer)]
        self.wv = [rng.normal(size=(width, 2 * width)) / np.sqrt(2 * width) for _ in range(n_layer)]
        self.noise, self.width, self.bad_sink, self.calls = noise, width, bad_sink, 0

    def groups(self) -> Any:
        return [[s[0] for s in self.shapes]]

    def tokens(self, n: int, length: Any, seed: int) -> Any:
        return [np.arange(length) + 1000 * i for i in range(n)]

    def rows(self, tokens: Any, sinks: Any) -> Any:
        self.calls += 1
        rng = np.random.default_rng(int(tokens[0]))
        k, v = (rng.normal(size=(len(tokens), self.width)) for _ in range(2))
        for il in range(len(self.shapes)):
            if il:
                below = k if self.fold else v
                k = k @ self.wk[il].T + (0.5 if self.fold else self.noise) * rng.normal(size=k.shape)
                v = np.concatenate([k, below], 1) @ self.wv[il].T + self.noise * rng.normal(size=k.shape)
            a, b = (k + 3).astype(np.float32), (v - 2).astype(np.float32)
            a[:sinks], b[:sinks] = 500, -500
            yield il, a[sinks:], b[sinks:]

    def queries(self, il: int, width: int) -> np.ndarray:
        return np.zeros(width)

    def pairs(self) -> str:
        return "none"

    def close(self) -> None:
        pass


@pytest.mark.parametrize("predictor", ["full", "fold"])
@pytest.mark.parametrize("form", ["f16", "q4_0"])
def test_known_predictors_are_found(tmp_path: Path, form: Any, predictor: Any) -> None:
    made = Made(fold=predictor == "fold")
    fit = predictors.fit(
        made,
        predictor=predictor,
        form=form,
        bits=predictors.Bits(4, 4),
        n_sequences=8,
        length=400,
        folder=tmp_path / "w",
    )
    for il in range(1, 4):
        got = [weights.to_f32(w, form) for w in fit.layers[il].weight if w is not None]
        assert len(got) == 2
        for w, want in zip(got, (made.wk[il], made.wv[il])):
            assert np.sqrt(((w - want) ** 2).mean() / (want**2).mean()) < 0.3
        known = fit.layers[il].explained[made.fold :]  # of keys there is much that nothing predicts
        assert min(known) > (0.97 if form == "f16" else 0.93)
    assert np.abs(fit.layers[2].mean[0] - 3).max() < 0.15 and np.abs(fit.layers[2].mean[1] + 2).max() < 0.15
    assert fit.layers[0].weight == [None, None] and [x.prev for x in fit.layers.values()] == [-1, 0, 1, 2]


def test_a_killed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opts: dict[str, Any] = {"n_sequences": 8, "length": 100, "folder": tmp_path / "w"}
    whole = predictors.fit(Made(), **{**opts, "folder": tmp_path / "other"})
    made, real = Made(), Made.rows

    def dies(self: Made, tokens: Any, sinks: Any) -> Any:
        if self.calls == 5:
            raise KeyboardInterrupt
        return real(self, tokens, sinks)

    monkeypatch.setattr(Made, "rows", dies)
    with pytest.raises(KeyboardInterrupt):
        predictors.fit(made, **opts)
    monkeypatch.setattr(Made, "rows", real)
    layer = predictors._Work.layer
    n: list[int] = []

    def stops(self: Any, *args: Any) -> Any:
        n.append(1)
        if len(n) == 3:
            raise KeyboardInterrupt
        return layer(self, *args)

    monkeypatch.setattr(predictors._Work, "layer", stops)
    with pytest.raises(KeyboardInterrupt):
        predictors.fit(made, **opts)
    assert made.calls == 8
    again = predictors.fit(made, **opts)
    assert made.calls == 8 and len(n) == 5
    for il, x in whole.layers.items():
        y = again.layers[il]
        assert (
            all(np.array_equal(a, b) for a, b in zip(x.mean, y.mean))
            and x.prev == y.prev
            and x.explained == y.explained
        )
        assert all(
            a is b is None or (a is not None and b is not None and np.array_equal(a, b))
            for a, b in zip(x.weight, y.weight)
        )


def test_layers_of_unequal_width_are_refused(tmp_path: Path) -> None:
    made = Made()
    made.shapes[2] = (2, 2, 16, 16)
    with pytest.raises(KvqError, match="layers 1 and 2"):
        predictors.fit(made, folder=tmp_path / "w")


# ------------------------------------------------------------------ whole models


def fit_both(folder: Any, **how: Any) -> Any:
    """A sidecar made for `full` that holds what `fold` wants as well; keys are predicted alike."""
    full, fold = (
        predictors.fit(capture.GgufSource(MODEL, TEXT, 256, 1), predictor=p, folder=folder / p, **how)
        for p in ("full", "fold")
    )
    arrays = {**files.predictor_arrays(fold), **files.predictor_arrays(full)}
    for il, layer in full.layers.items():
        ours, theirs = layer.weight[0], fold.layers[il].weight[0]
        assert not il or (ours is not None and theirs is not None and np.array_equal(ours, theirs))
    out = folder / "demo.kvq.gguf"
    files.write_sidecar(out, files.predictor_fields(MODEL, full, predictors.Bits(), 4), arrays)
    return out


@pytest.fixture(scope="module", params=["f16", "q4_0"])
def sidecar(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("predictors")
    return fit_both(folder, form=request.param, n_sequences=4, length=256, n_threads=1)


def opened(config: Any = None, opts: str = "", **kw: Any) -> Any:
    return Model(
        MODEL, kv_method="aqua", kv_opts=opts, kv_config=config, **{"n_ctx": 768, "n_ubatch": 64, "n_threads": 2, **kw}
    )


def kld(model: Any, ids: Any, want: Any) -> Any:
    x = model.logits(ids, n_ubatch=64).astype(np.float64)
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return float((np.exp(want) * (want - x)).sum(-1)[100:].mean())


@pytest.fixture(scope="module")
def exact() -> Any:
    with Model(MODEL, kv_method="f16", n_ctx=768, n_ubatch=64, n_threads=2) as m:
        ids = m.tokenize(TEXT[2000:])[:600]
        x = m.logits(ids, n_ubatch=64).astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return ids, x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_predictors_help_in_order(sidecar: Any, exact: Any) -> None:
    loss = {}
    for name in ("bias", "k", "full", "fold"):
        with opened(sidecar, f"predictor={name},window=32") as m:
            loss[name] = kld(m, *exact)
            line = m.load_line
        assert ("million multiply-adds a cell and token" in line) == (name != "bias"), line
    assert loss["k"] < 0.7 * loss["bias"] and loss["full"] < 0.8 * loss["k"] and loss["fold"] < 0.9 * loss["k"], loss


def test_auto_takes_what_the_file_was_made_for_and_a_model_may_hold_it(
    sidecar: Any, tmp_path: Path, exact: Any
) -> None:
    own = tmp_path / "demo-aqua.gguf"
    files.embed(MODEL, sidecar, own)
    form = 4 if any(t.type == 2 for t in gguf_header.read(sidecar, tensors=True).tensors) else 8
    with (
        opened(sidecar) as a,
        opened(sidecar, f"predictor=full,weights={form}") as b,
        Model(own, n_ctx=768, n_ubatch=64, n_threads=2) as c,
    ):
        assert "predictor full" in a.load_line and f"({form}-bit weights" in a.load_line
        rows = [m.logits(exact[0][:300]) for m in (a, b, c)]
        assert a.kv_stats()["bytes_total"] == b.kv_stats()["bytes_total"] == c.kv_stats()["bytes_total"]
    assert np.array_equal(rows[0], rows[1]) and np.array_equal(rows[0], rows[2])
    with Model(own, kv_method="upstream", n_ctx=512, n_threads=1) as m:  # llama.cpp itself does not mind the metadata
        assert m.logits(exact[0][:8]).shape[0] == 8


def test_auto_takes_fold(sidecar: Any, tmp_path: Path, exact: Any) -> None:
    def made_for_fold(m: Any, d: Any) -> None:
        m["kvq.aqua.predictor"] = "fold"
        for name in [n for n in d if n.endswith("v.weight")]:
            del d[name]

    with (
        opened(change(sidecar, tmp_path / "fold.gguf", made_for_fold)) as a,
        opened(sidecar, "predictor=fold") as b,
    ):
        assert "predictor fold" in a.load_line and "hold the rows of two layers" in a.load_line
        assert np.array_equal(*(m.logits(exact[0][:300]) for m in (a, b)))


@pytest.mark.parametrize("name", ["k", "full", "fold"])
def test_a_saved_state_comes_back_bit_for_bit(sidecar: Any, tmp_path: Path, name: str, exact: Any) -> None:
    ids = exact[0]
    with opened(sidecar, f"predictor={name},window=32") as m:
        for _ in m.feed(ids[:300]):
            pass
        m.save_state(tmp_path / "s")
        want = [x.copy() for x in m.feed(ids[300:330], outputs=np.ones(30, bool), n_ubatch=1)]
    with opened(sidecar, f"predictor={name},window=32") as m:
        m.load_state(tmp_path / "s")
        got = [x.copy() for x in m.feed(ids[300:330], outputs=np.ones(30, bool), n_ubatch=1)]
    assert np.array_equal(np.array(got), np.array(want))


@pytest.mark.parametrize("name", ["full", "fold"])
def test_threads_change_nothing(sidecar: Any, exact: Any, name: str) -> None:
    rows = []
    for n_threads in (1, 3):
        with opened(sidecar, f"predictor={name},window=32", n_threads=n_threads) as m:
            for _ in m.feed(exact[0][:400]):
                pass
            rows.append(np.array([x.copy() for x in m.feed(exact[0][400:420], outputs=np.ones(20, bool), n_ubatch=1)]))
    assert np.abs(rows[0] - rows[1]).max() < 2e-3  # sums over splits of the cells differ by f32 rounding


BAD = {
    "kvq.aqua.blk.2.k.weight is missing": lambda m, d: d.pop("kvq.aqua.blk.2.k.weight"),
    "kvq.aqua.blk.1.v.weight": lambda m, d: d.update({"kvq.aqua.blk.1.v.weight": d["kvq.aqua.blk.1.k.weight"]}),
    "kvq.aqua.blk.3.prev": lambda m, d: m.update({"kvq.aqua.blk.3.prev": 1}),
    "kvq.aqua.blk.4.k.weight is not of type": lambda m, d: d.update(
        {"kvq.aqua.blk.4.k.weight": np.zeros((2, 2), np.int8)}
    ),
    "kvq.aqua.blk.5.k.weight holds": (
        lambda m, d: d["kvq.aqua.blk.5.k.weight"].reshape(-1).view(np.uint8).__setitem__(slice(0, 2), (0, 0x7E))
    ),
}


@pytest.mark.parametrize("field", BAD)
def test_bad_predictors_are_refused_with_the_field_named(sidecar: Any, tmp_path: Path, field: Any) -> None:
    with pytest.raises(KvqError, match=field.replace(".", r"\.")):
        opened(change(sidecar, tmp_path / "bad.gguf", BAD[field]))


@pytest.mark.parametrize(("wanted", "ends"), [("full", "weight"), ("fold", "fold")])
def test_means_alone_do_not_make_a_predictor(sidecar: Any, tmp_path: Path, wanted: Any, ends: Any) -> None:
    def strip(m: Any, d: Any) -> None:
        for name in [n for n in d if n.endswith(ends)]:
            del d[name]

    with pytest.raises(KvqError, match=f"--predictor {wanted}"):
        opened(change(sidecar, tmp_path / "means.gguf", strip), f"predictor={wanted}")


# ------------------------------------------------------------------ Hugging Face


def test_hf_rows_are_what_the_gguf_caches(tmp_path: Path) -> None:
    """A random Llama, saved both ways: un-rotated keys in GGUF's order and values equal those in llama.cpp's cache."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from ggml_kvq.calibrate import hf

    gguf = files._gguf()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    folder, path = tmp_path / "hf", tmp_path / "m.gguf"
    model.save_pretrained(folder)
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {chr(0x100 + i): i for i in range(300)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=chr(0x100)))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(folder)
    _write_llama(gguf, path, model, config)
    ids = np.random.default_rng(1).integers(3, 300, 64)
    source = hf.HfSource(str(folder), path, "".join(chr(0x100 + i) for i in range(300)) * 2, 64)
    assert source.groups() == [[0, 1, 2]] and len(source.tokens(2, 64, 0)) == 2
    with capture.open_model(path, 64, 1) as m:
        native_rows = {il: (k, v) for il, k, v in capture.each(m, source.shapes, ids, 4)}
        for il, k, v in source.rows(ids, 4):
            for a, b in ((k, native_rows[il][0]), (v, native_rows[il][1])):
                assert np.abs(a - b).max() < 0.01 * np.abs(b).max(), il
            assert (
                np.abs(k[:, hf.gguf_order(2, 32, 32)] - native_rows[il][0]).max() > 0.5 * np.abs(k).max()
            )  # twice is wrong
    fit = predictors.fit(source, n_sequences=8, length=64, folder=tmp_path / "w")
    assert [x.prev for x in fit.layers.values()] == [-1, 0, 1]


def _write_llama(gguf: Any, path: Any, model: Any, config: Any) -> Any:
    """The conversion of llama.cpp: Q and K rows of each head from halves to pairs."""

    def pairs(w: Any, heads: int) -> Any:
        return w.reshape(heads, 2, w.shape[0] // heads // 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(32)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(
        [
            b"<unk>",
            b"<s>",
            b"</s>",
            *(f"<0x{i:02X}>".encode() for i in range(256)),
            *(f"t{i}".encode() for i in range(41)),
        ]
    )
    writer.add_token_scores([0.0] * 300)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 41)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for key, x in model.state_dict().items():
        w = x.numpy().astype(np.float32)
        name = {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
        }.get(key)
        if name is None:
            _, _, il, rest = key.split(".", 3)
            name = f"blk.{il}.{names[rest.removesuffix('.weight')]}.weight"
            w = pairs(w, 4) if "q_proj" in rest else pairs(w, 2) if "k_proj" in rest else w
        writer.add_tensor(name, w)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
