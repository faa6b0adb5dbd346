"""Method, options and calibrated data: one rule (gguf/resolve.cpp), the same through every door: variables of a
llama.cpp program, a launcher, Model.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import LLAMA_FIELDS
from ggml_kvq import Model, _paths, gguf_header, methods, resolver
from ggml_kvq.calibrate import files, xquant
from ggml_kvq.errors import KvqError
from ggml_kvq.launch import launcher
from ggml_kvq.resolver import Request, Resolved


@dataclass(frozen=True)
class Case:
    """What is given, and what holds: the load line's "method [options]", or words of the refusal ({} stands for how
    the door calls what it names).
    """

    holds: str
    model: str = "plain"
    method: str | None = None
    opts: str = ""
    config: str = ""
    refused: bool = False


def splits(n: int) -> str:
    return f"kq={n},vq=4,km=12,vm=12"


CASES = [
    Case("kivi [bits=2]", method="kivi", opts="bits=2"),
    Case(f"xquant [{splits(8)}", model="embedded"),
    Case(f"xquant [{splits(8)}", model="embedded", method="xquant"),
    Case("kivi,", model="embedded", method="kivi"),  # data of another method set nothing
    Case(f"xquant [{splits(6)}", model="beside", method="xquant"),
    Case(f"xquant [{splits(8)}", model="both", method="xquant"),  # embedded before the file beside
    Case("kivi [bits=2]", model="beside", method="kivi", opts="bits=2"),
    Case("xquant,", model="beside", method="xquant", config="none"),
    Case(f"xquant [{splits(4)}", config="other"),  # the file names the method
    Case(f"xquant [{splits(4)}", model="both", config="other"),  # and is stronger than what is found
    Case(f"xquant [{splits(4)}", method="xquant", config="other"),
    # a preset of the user's rules out the file's splits
    Case(
        "xquant [eta1=0.166666672,eta2=0.0450000018,shared=codes,group=32,window=64,preset=1.16]",
        model="embedded",
        opts="window=64, preset=1.16",
    ),
    Case("holds data for method xquant, not kivi", method="kivi", config="other", refused=True),
    Case("holds no kvq.* metadata", method="kivi", config="demo", refused=True),
    Case("nowhere.gguf is not a file", method="kivi", config="nowhere.gguf", refused=True),
    Case("bits=2 and bits=3 name one option twice", method="kivi", opts="bits=2,bits=3", refused=True),
    Case("unknown method 'kiwi': choose one of", method="kiwi", refused=True),
    Case("method kivi has no option 'bit'", method="kivi", opts="bit=2", refused=True),
    Case("option bits=9", method="kivi", opts="bits=9", refused=True),
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> dict[str, str]:
    """Models and a file of data: those embedded, beside and named differ in one option."""
    folder = tmp_path_factory.mktemp("what-holds")

    def data(name: str, kq: int) -> Path:
        path = folder / name
        files.write_sidecar(path, xquant.fields(demo_model, xquant.Config(kq, 4, 12, 12)), {})
        return path

    for name in ("plain", "beside"):
        (folder / f"{name}.gguf").symlink_to(demo_model)
    data("beside.kvq.gguf", 6)
    data("both.kvq.gguf", 6)
    files.embed(demo_model, data("embed.kvq.gguf", 8), folder / "both.gguf")
    (folder / "embedded.gguf").symlink_to(folder / "both.gguf")  # beside the link lies no file
    other = data("other.gguf", 4)
    models = {name: str(folder / f"{name}.gguf") for name in ("plain", "beside", "both", "embedded")}
    return {**models, "other": str(other), "demo": str(demo_model), "nowhere.gguf": "nowhere.gguf", "none": "none"}


def said(text: str) -> str:
    """Of a program's output: the load line behind "ggml-kvq: ", or the error."""
    lines = re.findall(r"^ggml-kvq: (error: .*|\w+(?: \[.*?\])?, K .*)$", text, re.MULTILINE)
    assert lines, text[-2000:]
    return lines[0]


def program(model: str, env: dict[str, str]) -> str:
    argv = [str(_paths.program("llama-completion")), "-m", model, "-no-cnv", "-p", "a", "-n", "1", "-c", "256"]
    env = {**os.environ, "GGML_BACKEND_PATH": str(_paths.backend()), **env}
    done = subprocess.run(
        [*argv, "-dev", "KVQ0", "-fa", "on", "-t", "1"], env=env, capture_output=True, text=True, timeout=120
    )
    return said(done.stderr)


def by_variables(case: Case, paths: dict[str, str]) -> str:
    given = {"KVQ_METHOD": case.method, "KVQ_OPTS": case.opts, "KVQ_CONFIG": paths.get(case.config)}
    return program(paths[case.model], {k: v for k, v in given.items() if v})


def by_launcher(case: Case, paths: dict[str, str]) -> str:
    """Half by flags, half by variables: the options are a flag's."""
    argv = ["-m", paths[case.model], *(["--kv-opt", case.opts] if case.opts else [])]
    argv += ["--kv-method", case.method] if case.method else []
    try:
        got = launcher.command("llama-completion", argv, {"KVQ_CONFIG": paths.get(case.config, "")})
    except KvqError as e:
        return f"error: {e}"
    return program(paths[case.model], {k: v for k, v in got.env.items() if v})


def by_argument(case: Case, paths: dict[str, str]) -> str:
    config = paths.get(case.config)
    try:
        with Model(paths[case.model], case.method, case.opts, config, n_ctx=256, n_threads=1) as m:
            return m.load_line.removeprefix("ggml-kvq: ")
    except KvqError as e:
        return f"error: {e}"


DOORS = (by_variables, by_launcher, by_argument)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.model}-{c.method}-{c.opts}-{c.config}")
def test_the_doors_agree(case: Case, paths: dict[str, str]) -> None:
    answers = [door(case, paths) for door in DOORS]
    for answer in answers:
        assert answer.startswith("error: ") == case.refused, answers
        assert case.holds in answer if case.refused else answer.startswith(case.holds), answers
    if not case.refused:
        assert len({answer.split(", K ")[0] for answer in answers}) == 1, answers


# ------------------------------------------------------------------ why

FLAGS, ARGUMENTS, VARIABLES = resolver.BY_FLAGS, resolver.BY_ARGUMENTS, 0
ENV = {"KVQ_METHOD": "kivi", "KVQ_OPTS": "bits=2,group=64"}
WHY = [  # method, why; options, why
    (Request(FLAGS, "kivi", "bits=3", env=ENV), ("kivi", "flag", "bits=3,group=64", "flag")),
    (Request(FLAGS, opts="bits=3", env=ENV), ("kivi", "environment", "bits=3,group=64", "flag")),
    (Request(FLAGS, env=ENV), ("kivi", "environment", "bits=2,group=64", "environment")),
    (Request(FLAGS, "higgs", env=ENV), ("higgs", "flag", "", "default")),  # options of another method
    (Request(FLAGS, "higgs", env={"KVQ_METHOD": "", "KVQ_OPTS": "bits=2"}), ("higgs", "flag", "bits=2", "environment")),
    (Request(FLAGS, number="--kv-bits 2.5", env=ENV), ("auto", "flag", "", "default")),
    (Request(FLAGS, "auto", number="--kv-bits 2.5"), ("auto", "flag", "", "default")),
    (Request(FLAGS, "none", env=ENV), ("none", "flag", "", "")),
    (Request(FLAGS, opts="bits=2"), ("", "", "", "")),
    (Request(VARIABLES, opts=" "), ("f16", "default", "", "flag")),  # the cache was given to us: exact
]
REFUSED = [
    (Request(FLAGS, "kivi", number="--kv-bits 2.5"), "--kv-bits 2.5 lets method auto choose, --kv-method kivi chooses"),
    (Request(ARGUMENTS, "kivi", number="kv_bits"), "kv_method='kivi' chooses by itself, kv_bits and kv_budget let"),
    (Request(FLAGS, "", env=ENV), "unknown method '': "),  # given, and no name
    (Request(FLAGS, env={"KVQ_METHOD": "kiwi"}), "KVQ_METHOD=kiwi: unknown method 'kiwi': "),
    (Request(FLAGS, "kivi", env={"KVQ_OPTS": "bits=2,bits=3"}), "KVQ_OPTS: bits=2 and bits=3 name one option twice"),
    (Request(FLAGS, "kivi", "bits=2,bits=3"), "--kv-opt: bits=2 and bits=3 name one option twice"),
    (
        Request(FLAGS, "kivi", config="/no"),
        "--kv-config /no is not a file; give a GGUF written by `ggml-kvq calibrate`",
    ),
    (Request(ARGUMENTS, "kivi", config="/no"), "kv_config=/no is not a file; give the sidecar GGUF written by"),
    (Request(FLAGS, "kivi", env={"KVQ_CONFIG": "/no"}), "KVQ_CONFIG=/no is not a file; give a GGUF"),
]


@pytest.mark.parametrize(("asker", "cure"), [(1, "--kv-config none"), (2, "kv_config='none'"), (0, "KVQ_CONFIG=none")])
def test_a_damaged_file_beside_the_model_is_told(asker: int, cure: str, write_gguf: Callable[..., Path]) -> None:
    """It was taken for none: aqua said that the model holds no data, xquant and auto ran without theirs."""
    model = write_gguf("m.gguf", LLAMA_FIELDS)
    model.with_name("m.kvq.gguf").write_bytes(model.read_bytes()[:100])
    for method in ("aqua", "xquant", "auto"):
        with pytest.raises(KvqError) as e:
            ask(Request(asker, method), model)
        assert "m.kvq.gguf', beside the model: it is not a readable GGUF" in str(e.value) and cure in str(e.value)
        assert ask(Request(asker, method, config="none"), model).config == ""


def ask(request: Request, model: Path | None = None) -> Resolved:
    return resolver.resolve(methods.library, request, gguf_header.read(model) if model else None)


@pytest.mark.parametrize(("asked", "want"), WHY)
def test_the_stronger_wins_and_says_so(asked: Request, want: tuple[str, ...]) -> None:
    got = ask(asked)
    assert (got.method, got.method_from, got.options.strip(), got.options_from) == want
    lost = asked.env == ENV and want[0] in ("higgs", "auto")
    assert got.note == ("KVQ_OPTS=bits=2,group=64 goes with KVQ_METHOD=kivi and is not used" if lost else "")


@pytest.mark.parametrize(("asked", "words"), REFUSED)
def test_a_refusal_is_in_the_words_of_who_asks(asked: Request, words: str) -> None:
    with pytest.raises(KvqError) as e:
        ask(asked)
    assert str(e.value).startswith(words) and "\n" not in str(e.value)


def test_where_data_come_from(write_gguf: Callable[..., Path]) -> None:
    held = {"general.type": "kvq", "kvq.version": 1}
    plain, own = (
        write_gguf(name, {**LLAMA_FIELDS, **more})
        for name, more in (("p.gguf", {}), ("m.v2.gguf", {"kvq.method": "aqua", "kvq.version": 1}))
    )
    beside = write_gguf("p.kvq.gguf", {**held, "kvq.method": "xquant", "kvq.xquant.window": 64})
    write_gguf("m.v2.kvq.gguf", {**held, "kvq.method": "auto"})
    named = write_gguf("n.gguf", {**held, "kvq.method": "aqua"})

    got = ask(Request(FLAGS, "xquant", "group=64"), plain)
    assert (got.config, got.config_from, got.options) == (str(beside), "sidecar", "window=64,group=64")
    assert got.opts == "group=64" and not got.wants_means
    assert ask(Request(FLAGS, "xquant"), plain).options_from == "sidecar"
    got = ask(Request(FLAGS), own)
    assert (got.method, got.method_from, got.config, got.config_from) == ("aqua", "embedded", str(own), "embedded")
    assert got.file is None and str(own) in got.method_words
    # means of one method serve those that take them, and no other
    for method in ("auto", "specache"):
        got = ask(Request(FLAGS, method), own)
        assert (got.config_from, got.wants_means) == ("embedded", False)
        assert ask(Request(FLAGS, method, config=str(named)), plain).config_from == "flag"
        assert ask(Request(FLAGS, method), plain).wants_means
    assert ask(Request(FLAGS, "kivi"), own).config_from == ""
    got = ask(Request(FLAGS, env={"KVQ_CONFIG": str(named)}), own)
    assert (got.method_from, got.config, got.config_from) == ("config", str(named), "environment")


@pytest.mark.parametrize(
    ("method", "opts", "wants"),
    [
        ("auto", "means=off", False),
        ("auto", "bits=3", True),
        ("auto", "far=f16", True),
        ("auto", "far=q4", False),
        ("specache", "far=q8", False),
        ("specache", "near=higgs", False),
        ("specache", "preset=paper", False),
        ("aqua", "", False),  # needs them: no means of a foreign text stand in for its own
        ("kivi", "", False),
    ],
)
def test_who_goes_better_with_means(method: str, opts: str, wants: bool) -> None:
    if opts.startswith("preset="):
        row = next(o for o in methods.find("specache")["options"] if o["key"] == "preset")
        opts = "preset=" + next(name for name in row["type"].split("|") if name != "none")
    assert ask(Request(ARGUMENTS, method, opts)).wants_means == wants


def test_several_models_of_a_bench_are_not_confused(paths: dict[str, str]) -> None:
    """The file beside one model is not used for another."""
    got = launcher.command("llama-bench", ["-m", f"{paths['plain']},{paths['beside']}", "--kv-method", "xquant"], {})
    assert got.env["KVQ_CONFIG"] is None and "KVQ_MODEL" not in got.env
    env = {**os.environ, "GGML_BACKEND_PATH": str(_paths.backend()), "KVQ_METHOD": "xquant"}
    argv = [str(_paths.program("llama-bench")), "-m", paths["beside"], "-m", paths["plain"], "-p", "0", "-n", "1"]
    done = subprocess.run([*argv, "-r", "1", "-dev", "KVQ0", "-fa", "1"], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "kq=6" not in done.stderr and done.stderr.count("ggml-kvq: xquant, K") == 2


def test_of_several_models_the_last_counts(paths: dict[str, str]) -> None:
    """As llama.cpp does."""
    argv = [str(_paths.program("llama-completion")), "-m", paths["plain"], "-m", paths["embedded"], "-no-cnv"]
    env = {**os.environ, "GGML_BACKEND_PATH": str(_paths.backend())}
    done = subprocess.run(
        [*argv, "-p", "a", "-n", "1", "-c", "256", "-dev", "KVQ0", "-fa", "on"], env=env, capture_output=True, text=True
    )
    assert said(done.stderr).startswith("xquant [kq=8")
