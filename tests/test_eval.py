"""Evaluation: measures against independent definitions and llama-perplexity, resume, adapters, figures."""

from __future__ import annotations

import hashlib
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, run_until_said
from ggml_kvq import Model, _paths, cli, errors, plotting
from ggml_kvq.core import chat
from ggml_kvq.evaluate import (
    documents,
    drift,
    metrics,
    perplexity,
    results,
    retrieval,
    specs,
    tasks,
)
from ggml_kvq.evaluate.run import nats

TEXT = tasks.default_filler(random.Random(3), 9000)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


def open_cache(spec: str, model: Path, n_ctx: int = 512, n_ubatch: int = 128) -> Model:
    return specs.parse(spec).open(model, n_ctx=n_ctx, n_batch=n_ctx, n_ubatch=n_ubatch, n_threads=2)


# ------------------------------------------------------------------ measures


def test_packed_rows_keep_log_probabilities_to_a_step() -> None:
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((40, 1001)) * 6).astype(np.float32)
    back = metrics.unpack(metrics.pack(logits), 1001)
    exact = metrics.log_softmax(logits)
    kept = exact >= exact.max(1, keepdims=True) - 15.9
    assert np.abs(back - exact)[kept].max() < 16 / 65535
    assert (back[~kept] <= exact.max(1, keepdims=True).repeat(1001, 1)[~kept] - 15.8).all()


def test_packed_constant_row_has_no_step() -> None:
    back = metrics.unpack(metrics.pack(np.zeros((1, 8), np.float32)), 8)
    assert np.allclose(back, -np.log(8))


def test_divergence_equals_the_definition_in_float64() -> None:
    rng = np.random.default_rng(2)
    base = (rng.standard_normal((150, 300)) * 4).astype(np.float32)
    other = base + rng.standard_normal((150, 300)).astype(np.float32) * 0.5
    targets = np.argsort(-base, axis=1)[np.arange(150), rng.integers(0, 8, 150)].astype(np.int32)
    run = metrics.Divergence()
    run.add(other[:70], metrics.pack(base[:70]), targets[:70])
    run.add(other[70:], metrics.pack(base[70:]), targets[70:])
    got = run.summary()

    p = base.astype(np.float64) - np.logaddexp.reduce(base.astype(np.float64), axis=1, keepdims=True)
    q = other.astype(np.float64) - np.logaddexp.reduce(other.astype(np.float64), axis=1, keepdims=True)
    kld = (np.exp(p) * (p - q)).sum(1)
    rows = np.arange(150)
    assert got["kld_mean"] == pytest.approx(kld.mean(), rel=1e-3)
    assert got["kld_median"] == pytest.approx(np.median(kld), rel=2e-3)
    assert got["kld_p99"] == pytest.approx(np.quantile(kld, 0.99), rel=2e-3)
    assert got["ppl"] == pytest.approx(np.exp(-q[rows, targets].mean()), rel=1e-5)
    assert got["ppl_base"] == pytest.approx(np.exp(-p[rows, targets].mean()), rel=1e-3)
    assert got["same_top"] == (p.argmax(1) == q.argmax(1)).mean()
    assert got["n_tokens"] == 150


@pytest.mark.parametrize(
    ("n_ctx", "stride", "first", "scored", "windows"), [(64, 0, 32, 31, 15), (64, 16, 47, 16, 59), (10, 3, 6, 3, 330)]
)
def test_windows_follow_llama_perplexity(n_ctx: int, stride: int, first: int, scored: int, windows: int) -> None:
    p = perplexity.Protocol(n_ctx, 8, stride)
    w = p.windows(np.arange(1000, dtype=np.int32))
    assert (p.first, p.n_scored, w.shape) == (first, scored, (windows, n_ctx))
    assert (np.diff(w, axis=1) == 1).all() and (np.diff(w[:, 0]) == (stride or n_ctx)).all()


def test_strided_windows_score_each_token_once(demo_model: Path) -> None:
    with open_cache("f16", demo_model, 128) as m:
        ids = perplexity.text_tokens(m, TEXT)[:400]
        p = perplexity.Protocol(128, 128, 32)
        seen = [t for w in p.windows(ids) for _, targets in perplexity.score(m, w, p) for t in targets]
    assert seen == ids[128 - 32 : 128 - 32 + len(seen)].tolist()


def test_short_text_is_refused() -> None:
    with pytest.raises(errors.KvqError, match="100 tokens are too few"):
        perplexity.Protocol(64, 64).windows(np.arange(100, dtype=np.int32))


def upstream_kld(model: Path, text: Path, base: Path, *extra: str) -> dict[str, float]:
    program = [
        str(_paths.program("llama-perplexity")),
        "-m",
        str(model),
        "-f",
        str(text),
        "-c",
        "512",
        "-b",
        "512",
        "-ub",
        "128",
    ]
    program += ["-fa", "on", "-t", "2", "--chunks", "3", "--kl-divergence-base", str(base), *extra]
    patterns = {
        "ppl": r"Mean PPL\(Q\)\s*:\s*([\d.]+)",
        "kld_mean": r"Mean\s+KLD:\s*([-\d.]+)",
        "kld_median": r"Median\s+KLD:\s*([-\d.]+)",
        "kld_p99": r"99.0%\s+KLD:\s*([-\d.]+)",
        "same_top": r"Same top p:\s*([\d.]+)",
    }
    last = patterns["same_top"] if "--kl-divergence" in extra else ""
    done = run_until_said(last, program, timeout=300, check=True)
    return {k: float(m.group(1)) for k, p in patterns.items() if (m := re.search(p, done.stdout))}


def test_agreement_with_llama_perplexity(demo_model: Path, text_file: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.base"
    upstream_kld(demo_model, text_file, theirs)
    want = upstream_kld(demo_model, text_file, theirs, "--kl-divergence", "-ctk", "q4_0", "-ctv", "q4_0")
    assert set(want) == {"ppl", "kld_mean", "kld_median", "kld_p99", "same_top"}

    protocol = perplexity.Protocol(512, 128, max_chunks=3)
    with open_cache("f16", demo_model) as m:
        windows = protocol.windows(perplexity.text_tokens(m, TEXT))
        ours = perplexity.BaseFile(tmp_path / "ours.base", protocol, windows, m.n_vocab)
        assert not ours.complete()
        ours.write(m)
    assert ours.complete()
    assert perplexity.BaseFile(theirs, protocol, windows, ours.n_vocab).complete()  # the two programs share the format
    with open_cache("upstream:q4_0", demo_model) as m:
        got = perplexity.divergence(m, ours).summary()
    assert len(got["kld_by_window"]) == len(ours.windows)
    assert np.mean(got["kld_by_window"]) == pytest.approx(got["kld_mean"], abs=1e-5)  # windows of one size
    for key, value in want.items():
        scale = 100 if key == "same_top" else 1
        assert got[key] * scale == pytest.approx(value, rel=0.01, abs=2e-6), key


def test_the_base_file_of_another_text_is_not_taken(tmp_path: Path) -> None:
    protocol = perplexity.Protocol(16, 16)
    a = perplexity.BaseFile(tmp_path / "x", protocol, protocol.windows(np.arange(64, dtype=np.int32)), 10)
    a.path.write_bytes(a.header() + bytes(a.n_bytes() - len(a.header())))
    assert a.complete()
    assert not perplexity.BaseFile(
        a.path, protocol, protocol.windows(np.arange(64, dtype=np.int32)[::-1]), 10
    ).complete()
    a.path.write_bytes(a.path.read_bytes()[:-1])
    assert not a.complete()


# ------------------------------------------------------------------ specs


@pytest.mark.parametrize(
    ("text", "label", "method", "options", "config", "types"),
    [
        ("f16", "f16", None, "", None, ("f16", "f16")),
        ("upstream:q4_0", "q4_0", None, "", None, ("q4_0", "q4_0")),
        ("upstream:q8_0/q4_0", "q8_0/q4_0", None, "", None, ("q8_0", "q4_0")),
        ("kivi", "kivi", "kivi", "", None, ("f16", "f16")),
        ("kivi:bits=2,group=64", "kivi:bits=2,group=64", "kivi", "bits=2,group=64", None, ("f16", "f16")),
        ("small=kivi:bits=2", "small", "kivi", "bits=2", None, ("f16", "f16")),
        ("aqua:predictor=k@c.gguf", "aqua:predictor=k", "aqua", "predictor=k", "c.gguf", ("f16", "f16")),
        ("method:f16", "kvq-f16", "f16", "", None, ("f16", "f16")),
    ],
)
def test_cache_specs(
    text: str, label: str, method: str | None, options: str, config: str | None, types: tuple[str, str]
) -> None:
    s = specs.parse(text)
    assert (s.label, s.method, s.options, s.config, (s.type_k, s.type_v)) == (label, method, options, config, types)


@pytest.mark.parametrize("text", ["", "upstream:q9_9", "upstream:f16/f16/f16", "kivi:bits", "method:", ":bits=2"])
def test_bad_specs_are_refused(text: str) -> None:
    with pytest.raises(errors.MethodError, match=re.escape(repr(text))):
        specs.parse(text)


# ------------------------------------------------------------------ tasks


def test_task_samples_never_change() -> None:
    filler = tasks.text_filler("\n".join(f"line {i} of a text that fills the space between facts" for i in range(900)))
    digest = hashlib.sha256()
    for task in tasks.TASKS[:8]:
        for seed in range(5):
            for f in (None, filler):
                digest.update("\x00".join(tasks.make(task, 2500, seed, f)).encode())
    assert digest.hexdigest()[:16] == "f06cfd015052becd"
    calls = "\x00".join("\x00".join(tasks.make("tools", 2500, seed)) for seed in range(5))
    assert hashlib.sha256(calls.encode()).hexdigest()[:16] == "c0e6d658c29d0a8c"


def test_the_demo_models_recipe_keeps_its_tasks() -> None:
    """It draws from those that its training knows the size of, in the order that they had then."""
    text = (ROOT / "scripts" / "train_demo_model.py").read_text()
    found = re.search(r"^CHARS_PER_TOKEN = \{\n(.*?)^\}", text, re.S | re.M)
    assert found and re.findall(r'"(\w+)":', found[1]) == tasks.TASKS[:8]
    assert "choice(tasks.TASKS)" not in text


def test_a_call_is_the_json_of_a_declared_function() -> None:
    for seed in range(20):
        prompt, answer = tasks.make("tools", 3000, seed)
        call = json.loads(answer)
        line = next(line for line in prompt.splitlines() if line.startswith(f'{{"name": "{call["name"]}", "param'))
        declared = json.loads(line)["parameters"]
        assert list(declared) == list(call["arguments"])
        assert [type(x) for x in call["arguments"].values()] == [str, int]
        words = call["name"].replace("_", " "), *map(str, call["arguments"].values())
        assert prompt.endswith("\nRequest: {} with {} and {}\nCall:".format(*words))


def test_a_chat_asks_in_the_models_template(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user says all but the last line; what the template adds counts as tokens."""
    with open_cache("f16", demo_model) as m:
        monkeypatch.setattr(
            m, "chat_prompt", lambda messages: chat.render(m._libs.llama, "<|im_start|>", messages, True, {})
        )
        text = retrieval.as_chat(m, "Some text.\nQuestion: which?\nAnswer:")
        assert text.endswith("<|im_start|>assistant\nAnswer:") and "Question: which?<|im_end|>" in text
        fed: list[int] = []
        score = retrieval.score_answer

        def note(model: Model, sample: retrieval.Sample, n_ubatch: int) -> tuple[bool, float]:
            fed.append(len(model.tokenize(sample.prompt, add_bos=True, special=sample.special)))
            return score(model, sample, n_ubatch)

        monkeypatch.setattr(retrieval, "score_answer", note)
        assert retrieval.run_cell(m, "passkey", 300, 3, chat=True)["n"] == 3
        assert all(0.85 * 300 < n <= 300 for n in fed)


@pytest.mark.parametrize("task", tasks.TASKS)
def test_samples_fit_and_the_fact_lies_where_said(task: str) -> None:
    depths = set()
    for seed in range(8):
        s = retrieval.make_sample(task, 400, seed, None, lambda t: len(t) // 4)
        assert s.answer.startswith(" ") and 0.85 * 400 <= (len(s.prompt) + len(s.answer)) / 4 <= 404
        if s.depth is None:
            assert task in ("vartrack", "count")
            continue
        at = int(s.depth * len(s.prompt))
        assert s.answer.strip().split()[0] in s.prompt[at : at + 160]
        depths.add(round(s.depth, 1))
    assert task in ("vartrack", "count") or len(depths) > 2


def test_retrieval_finds_what_the_cache_keeps(demo_model: Path) -> None:
    with open_cache("f16", demo_model) as m:
        good = retrieval.run_cell(m, "passkey", 400, 6)
        assert good["right"] >= 5 and good["n"] == 6
        assert sum(n for _, n in good["by_depth"]) == 6
        assert sum(r for r, _ in good["by_depth"]) == good["right"]
        sample = retrieval.make_sample("passkey", 400, 0, None, lambda s: len(m.tokenize(s)))
        wrong = retrieval.Sample(sample.prompt, " 00000", None)
        (is_right, nll), (is_wrong, more) = (
            retrieval.score_answer(m, sample, 512),
            retrieval.score_answer(m, wrong, 512),
        )
        assert is_right and not is_wrong and 0 <= nll < 0.1 < more
        for s, found in ((sample, nll), (wrong, more)):  # all at once, f16: the same likelihoods
            want = m.tokenize(s.answer)
            m.reset()
            ids = [*m.tokenize(s.prompt, add_bos=True), *want[:-1]]
            rows = np.concatenate([x.copy() for x in m.feed(ids, outputs=np.ones(len(ids)))])[-len(want) :]
            assert found == pytest.approx(-metrics.log_softmax(rows)[range(len(want)), want].mean(), rel=0.03, abs=1e-3)
        assert good["answer_nll_mean"] == pytest.approx(sum(good["answer_nll"]) / 6, abs=1e-4)


# ------------------------------------------------------------------ long generation


def test_f16_does_not_drift_from_itself_and_two_bits_do(demo_model: Path, tmp_path: Path) -> None:
    p = drift.DriftProtocol("The options are", 200, n_ubatch=64)
    path = tmp_path / "reference.npz"
    with open_cache("f16", demo_model) as m:
        drift.write_reference(path, m, p)
        same = drift.drift(m, path, p)
    assert same["parted_at"] == 200 and same["same_top"] == 1 and abs(same["kld_mean"]) < 1e-4
    with open_cache("kivi:bits=1,window=32", demo_model) as m:
        worse = drift.drift(m, path, p)
    assert worse["kld_mean"] > 0.01 and worse["parted_at"] < 200
    assert len(worse["kld_by_part"]) == drift.N_PARTS
    assert worse["kld_by_part"][0] < worse["kld_by_part"][-1]  # the first 32 tokens still lie in the window


# ------------------------------------------------------------------ documents


def test_document_scores() -> None:
    assert documents.token_f1("The Eiffel Tower, Paris", "eiffel tower") == pytest.approx(0.8)
    assert documents.token_f1("nothing", "eiffel") == 0
    assert documents.score("ruler", "codes 123 and 456", ("123", "789")) == 0.5
    assert documents.score("longbench", "a blue car", ("red", "Blue car.")) == 1.0
    assert documents.cut_middle(list(range(10)), 5) == [0, 1, 2, 8, 9]


def test_document_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"context": "C", "input": "Q", "answers": ["A"], "dataset": "qa"}) + "\n\n"
    )
    (tmp_path / "b.jsonl").write_text(json.dumps({"input": "R", "outputs": ["x", "y"]}) + "\n")
    got = list(documents.read(tmp_path))
    assert [k for k, _ in got] == ["longbench", "ruler"]
    assert got[0][1].prompt == "C\n\nQuestion: Q\nAnswer:" and got[1][1].answers == ("x", "y")
    (tmp_path / "a.jsonl").write_text('{"context": 1\n')
    with pytest.raises(errors.KvqError, match=r"a\.jsonl:1"):
        list(documents.read(tmp_path))
    (tmp_path / "a.jsonl").write_text('{"question": 1}\n')
    with pytest.raises(errors.KvqError, match="neither LongBench"):
        list(documents.read(tmp_path))
    with pytest.raises(errors.KvqError, match="no .jsonl"):
        list(documents.read(tmp_path / "none"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(errors.KvqError, match=r"empty\.jsonl holds no document"):
        list(documents.read(tmp_path / "empty.jsonl"))


# ------------------------------------------------------------------ the command


def run_eval(model: Path, out: Path, *args: str) -> int:
    return cli.main(["eval", "-m", str(model), "-o", str(out), "-t", "2", "--quiet", *args])


def test_command_measures_resumes_and_refuses(
    demo_model: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.jsonl"
    args = [
        "-f",
        str(text_file),
        "-c",
        "256",
        "--chunks",
        "2",
        "-ub",
        "64",
        "--cache",
        "kivi:bits=2",
        "--cache",
        "upstream:q1_0",
    ]
    args += ["--tasks", "passkey", "--lengths", "300", "--samples", "2"]
    assert run_eval(demo_model, out, *args) == 0
    first = capsys.readouterr().out
    rows = results.read(out)
    by = {(r["key"]["kind"], r["key"]["cache"]): r for r in rows}
    assert len(rows) == 6
    assert abs(by["text", "f16"]["kld_mean"]) < 1e-4 and by["text", "f16"]["bits"] == 16
    assert by["text", "kivi:bits=2"]["kld_mean"] > 0.001
    assert by["text", "kivi:bits=2"]["bits_no_window"] < by["text", "kivi:bits=2"]["bits"]
    assert "128" in by["text", "q1_0"]["refused"]
    for r in rows:
        assert r["commit"] and "ggml-kvq" not in r["machine"] and r["date"].endswith("Z")
    assert "kivi:bits=2" in first and "refused" in first

    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:2]) + lines[2][:40])  # killed while writing the third row
    assert run_eval(demo_model, out, *args) == 0
    assert out.read_text().splitlines(keepends=True)[:2] == lines[:2]
    again = {(r["key"]["kind"], r["key"]["cache"]): r for r in results.read(out)}
    assert again.keys() == by.keys()
    before = out.read_bytes()
    assert run_eval(demo_model, out, *args) == 0
    assert out.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.jsonl"]


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ([], "nothing to measure"),
        (["--tasks", "chess"], "chess"),
        (["--drift", "8", "--cache", "kivi", "--cache", "kivi"], "two caches are called kivi"),
        (["-f", "/no/such/text"], "/no/such/text"),
        (["-f", "TEXT", "-c", "99999"], "too few for windows of 99999; give 199998 or more, or lower -c"),
        (["-f", "TEXT", "-c", "4"], "-c 4 is too short to score"),
        (["-f", "TEXT", "-c", "512", "--stride", "999"], "--stride 999 must be 0 or below -c 512"),
        # the part that is refused comes behind one that would take long
        (["-f", "TEXT", "--tasks", "kv,lines", "--lengths", "4000,10"], "--lengths 10 is too short for --tasks lines"),
        (["-f", "TEXT", "--tasks", "kv", "--lengths", "0"], "--lengths 0 is too short for --tasks kv"),
        (["-f", "TEXT", "--documents", "EMPTY"], "empty.jsonl holds no document"),
        (["-f", "TEXT", "--documents", "ONE", "-c", "0"], "-c 0 has no room beside --max-tokens 64"),
        (["--tasks", "kv", "--lengths", "99999999"], "with --lengths 99999999: "),  # no context of the reference
        (["--drift", "99999999"], "try a smaller --drift"),
        (["--documents", "ONE", "-c", "99999999"], "try a smaller -c"),
    ],
)
def test_command_refusals(
    demo_model: Path, text_file: Path, tmp_path: Path, args: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Code 2, one line in words of the command line, before anything is measured: some were a trace, or a table of
    nothing.
    """
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "one.jsonl").write_text('{"context": "a", "input": "b", "answers": ["c"]}\n')
    files = {"TEXT": text_file, "EMPTY": tmp_path / "empty.jsonl", "ONE": tmp_path / "one.jsonl"}
    assert run_eval(demo_model, tmp_path / "r.jsonl", *(str(files.get(arg, arg)) for arg in args)) == 2
    out, err = capsys.readouterr()
    *warnings, message = err.splitlines()
    assert out == "" and message.startswith("ggml-kvq eval: error: ") and part in message
    assert all("exceeds the 4096 tokens that the model was trained for" in line for line in warnings)
    assert len(warnings) == ("99999" in " ".join(args))
    assert "n_ctx" not in message and not (tmp_path / "r.jsonl").exists()


def test_lengths_hold_every_sample(demo_model: Path) -> None:
    with open_cache("f16", demo_model) as m:

        def count(text: str) -> int:
            return len(m.tokenize(text))

        for task in tasks.TASKS:
            n = tasks.least(task, 3, None, count)
            retrieval.make_sample(task, n, 3, None, count)
            with pytest.raises(errors.KvqError, match=f"no {task} sample fits {n - 1} tokens, the shortest has {n};"):
                retrieval.make_sample(task, n - 1, 3, None, count)


def test_a_reference_that_was_refused_is_tried_again(
    demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Older versions left a row of it, on which every later run ended with 0."""
    out, args = tmp_path / "r.jsonl", ["--tasks", "passkey", "--lengths", "300", "--samples", "1"]
    assert run_eval(demo_model, out, *args) == 0
    key = results.read(out)[0]["key"]
    out.write_text(json.dumps({"key": key, "refused": "no room"}) + "\n")
    assert run_eval(demo_model, out, *args) == 0
    assert "accuracy" in results.read(out)[-1]
    out.write_text(json.dumps({"key": {**key, "n_tokens": 99999999}, "refused": "no room"}) + "\n")
    assert run_eval(demo_model, out, "--tasks", "passkey", "--lengths", "99999999", "--samples", "1") == 2
    assert "with --lengths 99999999" in capsys.readouterr().err


def test_help_says_where_rows_go(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli.main(["eval", "--help"])
    assert "result file (default results.jsonl); rows already there are reused" in capsys.readouterr().out


def test_a_divergence_of_nothing_has_no_sign() -> None:
    assert [nats(x, 5) for x in (-1e-9, 0.0, -2e-5, 0.012345)] == ["0.00000", "0.00000", "-0.00002", "0.01235"]


def test_the_recorded_command_names_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv", ["/usr/bin/ggml-kvq", "eval", "-m", "/home/me/model.gguf", "--cache", "kivi:bits=2,group=32"]
    )
    assert results.command() == "ggml-kvq eval -m model.gguf --cache kivi:bits=2,group=32"


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"key": {}}\n{"key"\n{"key": {}}\n')
    with pytest.raises(errors.KvqError, match=r"r\.jsonl:2"):
        results.read(path)


def test_tables_line_up() -> None:
    text = results.table(["cache", "bits"], [["a", "1.00"], ["longer", "16.00"]], markdown=True)
    assert text.splitlines() == ["| cache  |  bits |", "|--------|------:|", "| a      |  1.00 |", "| longer | 16.00 |"]


# ------------------------------------------------------------------ figures


def text_row(cache: str, method: str, bits: float, kld: float) -> dict[str, object]:
    key = {"kind": "text", "cache": cache, "model": "m.gguf", "text": "t.txt", "n_ctx": 512, "n_ubatch": 64}
    return {"key": key, "method": method, "bits": bits, "bits_no_window": bits * 0.8, "kld_mean": kld}


def cell_row(cache: str, method: str, bits: float, right: int) -> dict[str, object]:
    key = {"kind": "retrieval", "cache": cache, "model": "m.gguf", "task": "lines", "n_tokens": 1000}
    return {"key": key, "method": method, "bits": bits, "accuracy": right / 20, "right": right, "n": 20}


def is_figure(paths: list[Path], *names: str) -> bool:
    png, svg = paths
    width, height = np.frombuffer(png.read_bytes()[16:24], ">u4")
    text = svg.read_text()
    return png.read_bytes()[:4] == b"\x89PNG" and min(width, height) > 500 and all(f">{n}" in text for n in names)


def test_frontier_shows_every_cache(tmp_path: Path) -> None:
    rows = [
        text_row("f16", "upstream", 16, 0),
        text_row("q4_0", "upstream", 4.5, 0.01),
        text_row("kivi-2", "kivi", 3.9, 0.04),
    ]
    rows += [cell_row("q4_0", "upstream", 4.5, 20), cell_row("kivi-2", "kivi", 3.9, 13)]
    assert is_figure(plotting.frontier(rows, tmp_path / "frontier"), "q4_0", "kivi-2", "true bits per K or V value")
    with pytest.raises(errors.KvqError, match="ggml-kvq eval"):
        plotting.frontier([], tmp_path / "none")


def test_memory_is_planned_from_the_model(demo_model: Path, tmp_path: Path) -> None:
    caches = [specs.parse(s) for s in ("f16", "upstream:q4_0", "kivi:bits=2")]
    rows = plotting.memory_rows(demo_model, caches, [1024, 65536])
    size = {(r["key"]["cache"], r["key"]["n_ctx"]): r["bytes_total"] for r in rows}
    assert size["f16", 1024] == 12 * 2 * 2 * 64 * 1024 * 2
    assert size["q4_0", 1024] * 16 == size["f16", 1024] * 4.5
    with open_cache("kivi:bits=2", demo_model, 1024) as m:
        assert m.kv_stats()["bytes_total"] == size["kivi:bits=2", 1024]
    assert is_figure(plotting.memory(rows, tmp_path / "memory.png"), "q4_0  (4.50 bits)", "64k")


def test_speed_reads_llama_bench_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.jsonl"
    rows = [
        {
            "n_gen": 32,
            "n_depth": d,
            "avg_ts": 100 / (1 + d / 4096),
            "stddev_ts": 1.0,
            "type_k": "q4_0",
            "type_v": "q4_0",
        }
        for d in (0, 4096)
    ]
    rows += [{**r, "kv_method": "kivi", "kv_opts": "bits=2", "avg_ts": 90} for r in rows] + [
        {"n_gen": 0, "n_prompt": 512, "avg_ts": 500}
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert cli.main(["plot", "speed", str(path), "-o", str(tmp_path / "speed")]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.split()]
    assert is_figure(paths, "q4_0", "kivi bits=2", "4k")
