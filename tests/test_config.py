"""Configurations in GGUF: options that a file sets, XQuant's converter and its search."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ggml_kvq import Model, cli, gguf_header, info
from ggml_kvq.calibrate import files, xquant
from ggml_kvq.core import native
from ggml_kvq.errors import KvqError
from ggml_kvq.evaluate import perplexity

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models/kvq-demo-q8_0.gguf"
TEXT = (ROOT / "docs/llama-cpp.md").read_text()


@pytest.fixture
def sidecar(tmp_path: Path) -> Any:
    def write(config: Any) -> Any:
        out = tmp_path / "x.kvq.gguf"
        files.write_sidecar(out, xquant.fields(MODEL, config), {})
        return out

    return write


@pytest.mark.parametrize("n_layer", [12, 16, 32, 5])
@pytest.mark.parametrize("name", list(xquant.PRESETS))
def test_presets_scale_as_the_native_side_scales_them(name: str, n_layer: int) -> None:
    from ggml_kvq.core import loader

    lib = loader.libraries().need_kvq()
    c = xquant.preset(name, n_layer)
    shapes = [(il, 4, 64, 64) for il in range(n_layer)]
    splits: dict[str, object] = {"kq": c.kq, "vq": c.vq, "km": c.km, "vm": c.vm}
    a, b = (native.plan(lib, "xquant", o, shapes, 4096) for o in (dict[str, object](preset=name), splits))
    assert all(a[k] == b[k] for k in a if k != "options")
    if n_layer == 32:
        assert xquant.code_bits(c, 32) == pytest.approx(
            {"1.38": 1.375, "1.41": 1.40625, "1.16": 1.15625}[name]
        )  # XQuant, section 3.3
        assert a["bits_headline"] == pytest.approx(xquant.code_bits(c, 32))


def test_a_file_sets_options_and_the_user_overrides_them(sidecar: Any) -> Any:
    path = sidecar(xquant.Config(6, 4, 8, 6, eta1=0.25, group=64, window=64))

    def line(opts: Any = None, **kw: Any) -> Any:
        with Model(
            MODEL, kv_opts=opts, n_ctx=1024, n_threads=1, **{"kv_method": "xquant", "kv_config": path, **kw}
        ) as m:
            return m.kv_stats()

    same = line(
        {"kq": 6, "vq": 4, "km": 8, "vm": 6, "eta1": 0.25, "eta2": 0.045, "group": 64, "window": 64}, kv_config=None
    )
    stored = line()
    assert {k: v for k, v in stored.items() if k not in ("options", "caches")} == {
        k: v for k, v in same.items() if k not in ("options", "caches")
    }
    assert line(kv_method=None)["bytes_total"] == stored["bytes_total"]  # the file names the method too
    assert line({"window": 128})["bytes_window"] > stored["bytes_window"]
    # a preset of the user's replaces all four splits of the file
    assert (
        line({"preset": "1.16"})["bytes_codes"]
        == line({"preset": "1.16", "group": 64, "window": 64}, kv_config=None)["bytes_codes"]
    )


def test_a_model_may_hold_its_configuration(sidecar: Any, tmp_path: Path) -> None:
    own = tmp_path / "m.gguf"
    files.embed(MODEL, sidecar(xquant.Config(4, 4, 12, 12)), own)
    with Model(own, n_ctx=512, n_threads=1) as m:
        assert (
            m.kv_method == "xquant"
            and "kq=4" in m.kv_stats()["options"]
            and m.logits(m.tokenize(TEXT)[:40]).shape[0] == 40
        )
    assert info.stored_options(gguf_header.read(own))[0] == "xquant"


def test_a_bad_value_in_a_file_is_refused_by_name(sidecar: Any, tmp_path: Path) -> None:
    meta, _ = files.read_sidecar(sidecar(xquant.Config(4, 4, 12, 12)))
    meta["kvq.xquant.kq"] = 99
    bad = tmp_path / "bad.gguf"
    files.write_sidecar(bad, meta, {})
    with pytest.raises(KvqError, match="kq=99"):
        Model(MODEL, kv_config=bad, n_ctx=512, n_threads=1)
    with pytest.raises(KvqError, match="pair"):
        xquant.fields(MODEL, xquant.Config(5, 4, 12, 12))


def test_info_shows_what_a_file_chooses(sidecar: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", str(sidecar(xquant.Config(4, 4, 12, 12))), "-c", "4096"]) == 0
    out = capsys.readouterr().out
    assert "kvq.xquant.kq     4" in out and "this file chooses xquant [kq=4,vq=4" in out and "true bits" in out


def test_a_cache_spec_may_be_a_method_and_a_file() -> None:
    from ggml_kvq.evaluate import specs

    spec = specs.parse("aqua@some/calib.gguf")
    assert (spec.method, spec.options, spec.config, spec.label) == ("aqua", "", "some/calib.gguf", "aqua")
    assert specs.parse("x=kivi:bits=2@c.gguf").config == "c.gguf"


def test_the_converter_needs_no_data(tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"
    argv = [
        sys.executable,
        str(ROOT / "convert/convert_xquant_to_gguf.py"),
        "-m",
        str(MODEL),
        "-o",
        str(out),
        "--preset",
        "1.41",
    ]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    kvq = gguf_header.read(out).kvq()
    want = xquant.preset("1.41", 12)
    assert (kvq["kvq.xquant.kq"], kvq["kvq.xquant.vm"], kvq["kvq.method"]) == (
        want.kq,
        want.vm,
        "xquant",
    ) and "no data" in done.stdout


def test_the_search_shares_codes_only_where_that_beats_the_null(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The order of tries and what is kept, on losses that are known."""
    tried = []

    def search(share_helps: Any) -> Any:
        def loss_of(c: Any) -> Any:
            shares = sum(1 for il in range(1, 12, 2) for m in (c.km, c.vm) if il >= m)
            return (
                abs(c.eta1 - 0.25)
                + abs(c.eta2 - 0.09)
                + 0.02 * abs(c.kq - 8)
                + shares * (-0.001 if (c.shared == "codes") == share_helps else 0.001)
            )

        class Fake:
            n_vocab = 1

            def __init__(self, model: Any, method: str, opts: Any = None, **size: Any) -> None:
                self.opts = opts

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: Any) -> None:
                pass

        class Result:
            def __init__(self, value: int) -> None:
                self.value = value

            def summary(self) -> Any:
                return {"kld_mean": self.value}

        class Base:
            def __init__(self, *args: Any) -> None:
                pass

            def write(self, m: Any) -> None:
                pass

        def divergence(m: Any, base: Any, codes: Any) -> Any:
            codes.n_read = 1
            o = m.opts
            tried.append(o)
            return Result(
                loss_of(xquant.Config(**{**o, "eta1": next(e for e in xquant.ETA1 if abs(e - o["eta1"]) < 1e-6)}))
            )

        monkeypatch.setattr(xquant, "Model", Fake)
        monkeypatch.setattr(perplexity, "BaseFile", Base)
        monkeypatch.setattr(perplexity, "divergence", divergence)
        monkeypatch.setattr(perplexity, "text_tokens", lambda m, text: list(range(4096)))
        return xquant.search(MODEL, "", xquant.preset("1.38", 12), report=lambda line: None)

    start = xquant.code_bits(xquant.preset("1.38", 12), 12)
    for helps in (True, False):
        best = search(helps).best
        assert best.shared == ("codes" if helps else "none")
        assert (best.eta1, best.eta2, best.kq) == (0.25, 0.09, 8) and xquant.code_bits(best, 12) <= start + 1e-9
    assert len(tried) < 60


def test_a_short_search_on_the_demo_model_beats_its_preset() -> None:
    start = replace(xquant.preset("1.38", 12), window=0)
    found = xquant.search(MODEL, TEXT, start, n_ctx=256, chunks=1, n_threads=2, report=lambda line: None)
    losses = {c: kld for _, c, kld in found.tried}
    assert losses[found.best] == min(losses.values()) < 0.8 * losses[start]
