"""Model over ctypes: declarations, generation, interruption, isolation of contexts, state files."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ggml_kvq import Model, errors
from ggml_kvq.core import llama, loader, native
from ggml_kvq.core.chat import render
from ggml_kvq.core.sampling import Chain, Sampling

DEMO = Path(__file__).resolve().parent.parent / "models" / "kvq-demo-q8_0.gguf"
TEXT = "The register file holds sixteen words. Each word is read by the decoder before the next cycle begins. " * 12
PROMPT = "The following options are available:\n"
METHODS = ["upstream", "f16", "kivi", "xquant", "zipcache", "minikv"]


def open_model(method: str | None = "upstream", opts: object = None, **kwargs: object) -> Model:
    settings = {"n_ctx": 1024, "n_batch": 512, "n_ubatch": 128, "n_threads": 2, **kwargs}
    return Model(DEMO, method, opts, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plain() -> Iterator[Model]:
    with open_model() as m:
        yield m


# ------------------------------------------------------------------ declarations and loading


def test_every_struct_is_proven_by_the_native_probe() -> None:
    loader.prove_structs(loader.libraries().need_kvq())


@pytest.mark.parametrize("name", sorted({**llama.STRUCTS, **native.STRUCTS}))
def test_a_wrong_field_order_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = llama.STRUCTS if name in llama.STRUCTS else native.STRUCTS
    fields = list(table[name]._fields_)
    extended = type(name, (ctypes.Structure,), {"_fields_": [("inserted", ctypes.c_int64), *fields]})
    monkeypatch.setitem(table, name, extended)
    with pytest.raises(errors.LibraryError, match=name):
        loader.prove_structs(loader.libraries().need_kvq())


def test_swapped_fields_of_equal_size_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = list(llama.llama_context_params._fields_)
    i = next(i for i, f in enumerate(fields) if f[0] == "type_k")
    fields[i], fields[i + 1] = fields[i + 1], fields[i]
    monkeypatch.setitem(llama.STRUCTS, "llama_context_params", type("p", (ctypes.Structure,), {"_fields_": fields}))
    with pytest.raises(errors.LibraryError, match="llama_context_params.type_"):
        loader.prove_structs(loader.libraries().need_kvq())


def test_unexpected_defaults_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    lib = loader.libraries().llama
    loader.prove_defaults(lib)
    monkeypatch.setitem(llama.DEFAULTS["llama_context_default_params"], "n_ubatch", 513)
    with pytest.raises(errors.LibraryError, match="n_ubatch reads 512 instead of 513"):
        loader.prove_defaults(lib)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_a_visible_copy_of_libstdcxx_is_caught(tmp_path: Path) -> None:
    source = tmp_path / "stream.cpp"
    source.write_text('#include <iostream>\nextern "C" void print(long x) { std::cout << x; }\n')

    def linked(name: str, *flags: str) -> tuple[ctypes.CDLL, Path]:
        path = tmp_path / name
        subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(path), *flags], check=True)
        return ctypes.CDLL(str(path)), path

    loader.prove_one_runtime(*linked("shared.so"))
    loader.prove_one_runtime(*linked("private.so", "-static-libstdc++", "-Wl,--exclude-libs,libstdc++.a"))
    with pytest.raises(errors.LibraryError, match="static libstdc.*copies.so shows"):
        loader.prove_one_runtime(*linked("copies.so", "-static-libstdc++"))


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("variable", ["KVQ_LIB_DIR", "KVQ_BACKEND"])
def test_missing_libraries_fail_on_first_use_not_at_import(variable: str, tmp_path: Path) -> None:
    target = str(tmp_path / "nothing")
    done = run_python("import ggml_kvq, ggml_kvq.core.model; print('imported')", **{variable: target})
    assert (done.returncode, done.stdout, done.stderr) == (0, "imported\n", "")
    done = run_python("from ggml_kvq.core.loader import libraries\nlibraries()", **{variable: target})
    assert done.returncode == 1
    assert "LibraryError" in done.stderr and target in done.stderr and variable in done.stderr


def test_diagnosis_names_versions_and_devices() -> None:
    text = "\n".join(loader.diagnose())
    assert llama.GGML_VERSION in text and "KVQ0" in text and "kivi" in text


def test_a_quiet_load_prints_nothing_and_keeps_the_line() -> None:
    code = (
        f"from ggml_kvq import Model\nm = Model({str(DEMO)!r}, 'kivi', n_ctx=512)\nassert 'kivi' in m.load_line,"
        " m.load_line\nm.close()"
    )
    done = run_python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("kwargs", "kind", "parts"),
    [
        ({"path": "/no/such.gguf"}, errors.ModelError, ["/no/such.gguf"]),
        ({"path": __file__}, errors.KvqError, ["test_model.py", "GGUF"]),
        ({"kv_method": "kivii"}, errors.MethodError, ["kivii", "kivi"]),
        ({"kv_method": "kivi", "kv_opts": {"bits": 9}}, errors.MethodError, ["bits", "9"]),
        ({"kv_method": "kivi", "kv_opts": "colour=red"}, errors.MethodError, ["colour"]),
        ({"kv_method": "kivi", "type_k": "bf16"}, errors.MethodError, ["bf16", "kivi", "q4_0"]),
        ({"kv_method": "f16", "type_k": "q8_0"}, errors.MethodError, ["declared q8_0", "16."]),
        ({"kv_method": "kivi", "kv_config": "/no/such.gguf"}, errors.MethodError, ["/no/such.gguf"]),
        ({"kv_method": "kivi", "device": "CPU"}, errors.ModelError, ["CPU", "KVQ0"]),
        ({"device": "KVQ0"}, errors.ModelError, ["KVQ0", "kv_method"]),
        ({"device": "TPU7"}, errors.ModelError, ["TPU7", "KVQ0"]),
        ({"kv_opts": {"bits": 2}}, errors.MethodError, ["bits=2", "kv_method"]),
        ({"type_k": "q9"}, errors.MethodError, ["q9", "q8_0"]),
        ({"type_k": "q1_0"}, errors.ModelError, ["q1_0", "128"]),
        ({"n_ubatch": 0}, errors.ModelError, ["n_ubatch=0"]),
    ],
)
def test_refusals_are_one_line_naming_value_and_cure(
    kwargs: dict[str, object], kind: type[Exception], parts: list[str]
) -> None:
    with pytest.raises(kind) as caught:
        Model(**{"path": DEMO, "n_ctx": 512, **kwargs})  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


# ------------------------------------------------------------------ tokens and logits


@pytest.mark.parametrize("text", ["plain words", "Grüße, 世界 \U0001f600\n\ttabs", "", "\u0000 zero", "a" * 5000])
def test_tokenize_round_trip(plain: Model, text: str) -> None:
    assert plain.detokenize(plain.tokenize(text)) == text


def test_logits_have_one_row_per_token_whatever_the_batching(plain: Model) -> None:
    ids = plain.tokenize(TEXT, add_bos=True)
    whole = plain.logits(ids)
    assert whole.shape == (len(ids), plain.n_vocab) and whole.dtype == np.float32
    assert np.isfinite(whole).all()
    parts = plain.logits(ids, n_ubatch=17)
    assert (whole.argmax(1) == parts.argmax(1)).mean() > 0.98
    assert np.abs(whole - parts).max() < 1.0
    assert len(ids) == len(plain.tokens)


def test_f16_method_agrees_with_upstream(plain: Model) -> None:
    ids = plain.tokenize(TEXT, add_bos=True)
    a = plain.logits(ids)
    with open_model("f16") as m:
        b = m.logits(ids)
    p = np.exp(a - np.logaddexp.reduce(a, axis=1, keepdims=True))
    q = b - np.logaddexp.reduce(b, axis=1, keepdims=True)
    kld = (p * (a - np.logaddexp.reduce(a, axis=1, keepdims=True) - q)).sum(1)
    assert kld.mean() < 2e-3
    assert (a.argmax(1) == b.argmax(1)).mean() > 0.96


def test_perplexity_of_text_beats_its_reverse(plain: Model) -> None:
    ids = plain.tokenize(TEXT * 3)[:800]
    forward = plain.perplexity(ids, n_ctx=256)
    backward = plain.perplexity(ids[::-1], n_ctx=256)
    assert 1 < forward < backward


def test_overflow_and_foreign_tokens_are_refused(plain: Model) -> None:
    with pytest.raises(errors.ContextOverflowError, match="n_ctx=1024"):
        plain.logits([1] * 1025)
    with pytest.raises(errors.DecodeError, match="token 8192"):
        plain.logits([8192])
    with pytest.raises(errors.ContextOverflowError, match="prompt tokens"):
        plain.generate([1] * 2000)


# ------------------------------------------------------------------ generation


@pytest.mark.parametrize("method", METHODS)
def test_greedy_generation_follows_the_logits(method: str) -> None:
    with open_model(method) as m:
        text = "".join(m.generate(PROMPT, max_tokens=12, temperature=0))
        ids = m.tokenize(PROMPT, add_bos=True)
        n = len(ids)
        for _ in range(12):
            m.reset()
            for logits in m.feed(ids[:n]):
                pass
            for token in ids[n:]:
                for logits in m.feed([token]):
                    pass
            ids.append(int(logits[-1].argmax()))
        assert text == m.detokenize(ids[n:])
        assert m.finish_reason == "length"


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_character_that_a_limit_cuts_comes_with_the_rest(
    plain: Model, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a limit inside a character, replacement characters came at the end of one text and in the next."""
    ids = plain.tokenize("\U0001f600 世界 \U0001f600\U0001f600")
    data = [plain.piece(i) for i in ids]
    assert any(not is_text(b"".join(data[:i])) for i in range(n, len(ids), n))
    left: list[int] = []
    monkeypatch.setattr(Chain, "sample", lambda self, ctx, row=-1: left.pop(0))
    for first in (0, 1):  # the prompt ends inside a character, too
        left[:] = ids[first:]
        prompt = plain.tokenize("text", add_bos=True) + ids[:first]
        text = "".join(plain.generate(prompt, max_tokens=n, temperature=0))
        while len(left) >= n:
            text += "".join(plain.generate("", reset=False, max_tokens=n, temperature=0))
        whole = b"".join(data).decode()
        assert text and whole.startswith(text) and len(whole) - len(text) <= n


def is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def test_stream_pieces_are_whole_characters_and_join_to_the_text(plain: Model) -> None:
    pieces = list(
        plain.generate(
            "Grüße 世界 \U0001f600 é", max_tokens=200, temperature=1.5, top_p=1.0, min_p=0.0, top_k=0, seed=3
        )
    )
    assert len(pieces) > 20
    for piece in pieces:
        piece.encode("utf-8").decode("utf-8")
    tail = plain.tokens[len(plain.tokenize("Grüße 世界 \U0001f600 é", add_bos=True)) :]
    # not detokenize(), which takes spaces away in front of full stops
    assert "".join(pieces).startswith(b"".join(map(plain.piece, tail)).decode("utf-8", "replace")[:40])


def test_stop_string_cuts_exactly_even_across_pieces(plain: Model) -> None:
    full = "".join(plain.generate(PROMPT, max_tokens=60, temperature=0))
    for a, b in ((5, 9), (11, 26), (20, 21)):
        stop = full[a:b]
        out = "".join(plain.generate(PROMPT, max_tokens=60, temperature=0, stop=[stop, "\x00never"]))
        assert out == full[: full.find(stop)]
        assert plain.finish_reason == "stop"


def test_seed_decides_and_none_varies(plain: Model) -> None:
    def run(seed: int | None) -> str:
        return "".join(plain.generate(PROMPT, max_tokens=24, temperature=1.2, seed=seed))

    assert run(5) == run(5)
    assert len({run(s) for s in range(4)}) > 1
    assert len({run(None) for _ in range(4)}) > 1


def test_sampling_options_change_the_text(plain: Model) -> None:
    greedy = "".join(plain.generate(PROMPT, max_tokens=60, temperature=0))
    assert "".join(plain.generate(PROMPT, max_tokens=60, temperature=2.0, top_k=1)) == greedy
    assert "".join(plain.generate(PROMPT, max_tokens=60, temperature=2.0, top_k=0, top_p=1.0, min_p=1.0)) == greedy
    assert "".join(plain.generate(PROMPT, max_tokens=60, temperature=0, repeat_penalty=1.8)) != greedy
    assert "".join(plain.generate(PROMPT, max_tokens=0)) == ""


@pytest.mark.parametrize(
    "bad",
    [
        *({"temperature": -1}, {"top_p": 0}, {"min_p": 2}, {"repeat_penalty": 0}, {"seed": -1}, {"colour": 1}),
        *({"stop": ""}, {"top_k": 1 << 31}, {"repeat_last_n": 1 << 31}, {"temperature": float("inf")}),
        *({"repeat_penalty": float("nan")}, {"frequency_penalty": float("nan")}, {"presence_penalty": float("inf")}),
    ],
)
def test_bad_sampling_options_are_refused_at_the_call(plain: Model, bad: dict[str, Any]) -> None:
    stop = bad.get("stop")
    with pytest.raises(errors.KvqError, match=next(iter(bad))):
        plain.generate(PROMPT, **({"stop": [stop]} if stop is not None else bad))


def test_generation_stops_when_the_context_is_full() -> None:
    with open_model(n_ctx=256) as m:
        n = len(m.tokenize(PROMPT, add_bos=True))
        list(m.generate(PROMPT, max_tokens=-1, temperature=0))
        assert m.finish_reason == "context"
        assert 256 >= len(m.tokens) > n


def close(pieces: Iterator[str]) -> None:
    assert isinstance(pieces, Generator)
    pieces.close()


def test_continuing_equals_one_long_generation(plain: Model) -> None:
    whole = "".join(plain.generate(PROMPT, max_tokens=20, temperature=0))
    tokens = plain.tokens
    first = "".join(plain.generate(PROMPT, max_tokens=10, temperature=0))
    rest = "".join(plain.generate("", reset=False, max_tokens=10, temperature=0))
    assert first + rest == whole
    assert plain.tokens == tokens
    pieces = plain.generate(PROMPT, max_tokens=20, temperature=0)
    first = "".join(next(pieces) for _ in range(5))
    close(pieces)
    rest = "".join(plain.generate("", reset=False, max_tokens=15, temperature=0))
    assert first + rest == whole
    assert plain.tokens == tokens


@pytest.mark.parametrize("method", ["upstream", "f16", "kivi"])
@pytest.mark.parametrize("left", [False, True])
def test_a_saved_generation_goes_on_behind_its_text(method: str, left: bool, tmp_path: Path) -> None:
    """The token sampled last was not in the file: what continued from it began with that token once more."""
    with open_model(method) as m:
        whole = "".join(m.generate(PROMPT, max_tokens=20, temperature=0))
        stream = m.generate(PROMPT, max_tokens=20 if left else 10, temperature=0)
        first = "".join(next(stream) for _ in range(5)) if left else "".join(stream)
        close(stream)
        m.save_state(tmp_path / "state")
        held = m.tokens
        assert m.detokenize(held).lstrip() == PROMPT + first
        assert whole.startswith(first + "".join(m.generate("", reset=False, max_tokens=10, temperature=0)))
    with open_model(method) as m:
        assert m.load_state(tmp_path / "state") == len(held)
        assert whole.startswith(first + "".join(m.generate("", reset=False, max_tokens=10, temperature=0)))


def test_a_state_of_a_full_context_goes_without_the_last_token(tmp_path: Path) -> None:
    with open_model(n_ctx=256) as m:
        list(m.generate(PROMPT, max_tokens=-1, temperature=0))
        assert len(m.tokens) == 256
        m.save_state(tmp_path / "state")
        assert m.load_state(tmp_path / "state") == 256


def test_an_appended_prompt_follows_the_whole_answer(plain: Model) -> None:
    """The last token of an answer that max_tokens ended was not in the cache, and the next turn of a chat lacked it."""
    answer = "".join(plain.generate(PROMPT, max_tokens=6, temperature=0))
    list(plain.generate(" Thanks.", reset=False, max_tokens=0))
    list(plain.generate("", reset=False, max_tokens=1))
    assert plain.detokenize(plain.tokens).lstrip() == PROMPT + answer + " Thanks."
    plain.truncate(len(plain.tokens) - 1)  # whoever edits the tokens means what they hold
    held = plain.tokens
    list(plain.generate(" more", reset=False, max_tokens=1))
    assert plain.tokens[: len(held) + 1] == held + plain.tokenize(" more")[:1]


# ------------------------------------------------------------------ contexts side by side


def greedy(m: Model) -> str:
    return "".join(m.generate(TEXT + PROMPT, max_tokens=16, temperature=0))


def test_methods_side_by_side_answer_as_alone() -> None:
    ids = None
    alone = {}
    for method in METHODS:
        with open_model(method) as m:
            ids = m.tokenize(TEXT, add_bos=True)
            alone[method] = m.logits(ids)
    assert ids is not None
    models = {method: open_model(method) for method in reversed(METHODS)}
    try:
        for method, m in models.items():
            assert np.array_equal(m.logits(ids), alone[method]), method
        models.pop("kivi").close()
        for method, m in models.items():
            assert np.array_equal(m.logits(ids), alone[method]), method
            assert m.kv_stats()["method"] == method
    finally:
        for m in models.values():
            m.close()
    assert not np.array_equal(alone["kivi"], alone["xquant"])


def test_threads_run_models_at_the_same_time() -> None:
    with open_model("kivi", n_threads=1) as a, open_model("xquant", n_threads=1) as b:
        want = {m: greedy(m) for m in (a, b)}
        got: dict[Model, list[str]] = {a: [], b: []}
        threads = [threading.Thread(target=lambda m=m: got[m].extend(greedy(m) for _ in range(3))) for m in (a, b)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for m in (a, b):
            assert got[m] == [want[m]] * 3


def test_the_interpreter_runs_while_a_batch_is_decoded() -> None:
    with open_model(n_ctx=2048, n_batch=2048, n_ubatch=2048) as m:
        ids = m.tokenize(TEXT * 8)[:2000]
        ticks, done = [0], threading.Event()

        def count() -> None:
            while not done.is_set():
                ticks[0] += 1
                time.sleep(0.001)

        t = threading.Thread(target=count)
        t.start()
        for _ in m.feed(ids):
            pass
        done.set()
        t.join()
        assert ticks[0] > 10


def test_close_twice_and_use_after_close() -> None:
    m = open_model("kivi")
    m.close()
    m.close()
    for use in (
        m.reset,
        m.kv_stats,
        lambda: m.tokenize("x"),
        lambda: m.metadata("general.name"),
        lambda: next(m.generate("x")),
    ):
        with pytest.raises(errors.ModelError, match="closed"):
            use()


# ------------------------------------------------------------------ interruption


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also in a process that a shell started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("method", ["upstream", "kivi"])
def test_ctrl_c_stops_a_long_decode_and_the_model_lives_on(method: str) -> None:
    with open_model(method, n_ctx=4096, n_batch=4096, n_ubatch=512) as m:
        ids = m.tokenize(TEXT * 20)[:4000]
        start = time.monotonic()
        for _ in m.feed(ids):
            pass
        full = time.monotonic() - start
        m.reset()
        timer = threading.Timer(min(0.3, full / 5), os.kill, (os.getpid(), signal.SIGINT))
        start = time.monotonic()
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            for _ in m.feed(ids):
                pass
        assert time.monotonic() - start < 0.8 * full
        assert len(m.tokens) < len(ids)
        want = greedy(m)
        m.reset()
        assert greedy(m) == want


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_between_tokens() -> None:
    with open_model() as m:
        stream = m.generate(PROMPT, max_tokens=-1, temperature=0)
        next(stream)
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            while True:
                next(stream, None)
        assert len("".join(m.generate(PROMPT, max_tokens=4, temperature=0))) > 0


# ------------------------------------------------------------------ accounting and state


def test_kv_stats_add_up() -> None:
    with open_model("kivi", {"bits": 2}) as m:
        s = m.kv_stats()
        parts = ("codes", "params", "window", "tables", "calibration")
        assert s["bytes_total"] == sum(s[f"bytes_{p}"] for p in parts)
        assert s["bytes_f16"] == 2 * 1024 * m.n_layer * m.n_head_kv * 64 * 2
        assert s["bits"] == pytest.approx(16 * s["bytes_total"] / s["bytes_f16"])
        assert 2 < s["bits"] < 16
        m.logits(m.tokenize(TEXT, add_bos=True)[:400])
        assert m.kv_stats()["n_sealed"] > 0
        assert [d.split(":")[0] for d in m.devices] == ["KVQ0"]
    with open_model(type_k="q8_0", type_v="q4_0") as m:
        assert all(not d.startswith("KVQ") for d in m.devices) and m.devices
        s = m.kv_stats()
        assert (s["bits_k"], s["bits_v"], s["bits"]) == (8.5, 4.5, 6.5)
        assert s["bytes_total"] == pytest.approx(1024 * m.n_layer * m.n_head_kv * 64 * (8.5 + 4.5) / 8, rel=0.01)


@pytest.mark.parametrize("method", METHODS)
def test_a_restored_state_continues_like_the_saved_one(method: str, tmp_path: Path) -> None:
    path = tmp_path / "state.bin"
    with open_model(method) as m:
        for _ in m.feed(m.tokenize(TEXT, add_bos=True)[:300]):
            pass
        m.save_state(path)
        held, sealed = m.tokens, m.kv_stats().get("n_sealed", 0)
        want = "".join(m.generate(PROMPT, reset=False, max_tokens=16, temperature=0))
        m.reset()
        assert m.load_state(path) == 300 and m.tokens == held
        assert "".join(m.generate(PROMPT, reset=False, max_tokens=16, temperature=0)) == want
    with open_model(method) as m:
        m.load_state(path)
        assert (m.kv_stats().get("n_sealed", 0) > 0) == (sealed > 0), "pages that came sealed count as such"
        assert "".join(m.generate(PROMPT, reset=False, max_tokens=16, temperature=0)) == want
    assert [p.name for p in tmp_path.iterdir()] == ["state.bin"]


def test_bad_state_files_are_refused_and_leave_the_model_usable(tmp_path: Path) -> None:
    with open_model("kivi") as m:
        for _ in m.feed(m.tokenize(TEXT, add_bos=True)[:200]):
            pass
        good = tmp_path / "good"
        m.save_state(good)
        with pytest.raises(errors.StateError, match="nowhere"):
            m.save_state(tmp_path / "nowhere" / "state")
        assert m.tokens
        (tmp_path / "foreign").write_bytes(b"GGUF" + bytes(100))
        (tmp_path / "cut").write_bytes(good.read_bytes()[: good.stat().st_size // 2])
        for name in ("foreign", "cut", "missing"):
            with pytest.raises(errors.StateError, match=name):
                m.load_state(tmp_path / name)
        assert greedy(m)
    with open_model("kivi", n_ctx=256, n_batch=256) as m:
        long = tmp_path / "good"
        assert m.load_state(long) == 200


def test_truncate_drops_the_tail(plain: Model) -> None:
    ids = plain.tokenize(TEXT, add_bos=True)[:64]
    plain.logits(ids)
    plain.truncate(40)
    assert plain.tokens == ids[:40]
    for logits in plain.feed(ids[40:]):
        again = logits[-1].copy()
    assert int(again.argmax()) == int(plain.logits(ids)[-1].argmax())
    with pytest.raises(errors.KvqError, match="outside 0..64"):
        plain.truncate(65)


# ------------------------------------------------------------------ chat templates


def test_demo_template_continues_the_text(plain: Model) -> None:
    assert plain.chat_prompt([{"role": "user", "content": "one "}, {"role": "user", "content": "two"}]) == "one two"


def test_templates_known_by_shape_and_by_jinja() -> None:
    lib = loader.libraries().llama
    messages = [{"role": "user", "content": "Hi"}]
    chatml = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    assert render(lib, chatml, messages, True, {}) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    own = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role|upper }}] {{ m.content }}{% endfor %}{% if"
        " add_generation_prompt %}>{% endif %}"
    )
    assert render(lib, own, messages, True, {"bos_token": "<s>"}) == "<s>[USER] Hi>"
    with pytest.raises(errors.ModelError, match="only users"):
        render(lib, "{{ raise_exception('only users') }}", messages, True, {})
    with pytest.raises(errors.ModelError, match="role"):
        render(lib, own, [{"content": "x"}], True, {})


def test_sampling_defaults_are_llama_cli_s() -> None:
    assert (Sampling().temperature, Sampling().top_k, Sampling().top_p, Sampling().min_p) == (0.8, 40, 0.95, 0.05)
