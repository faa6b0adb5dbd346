"""What strangers tried with README.md, docs/ and --help alone, and what they were told. docs/trials.md has the list."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import LLAMA_FIELDS, ROOT
from ggml_kvq import Model, cli, default_means, gguf_header, info, named
from ggml_kvq.calibrate import files, means
from ggml_kvq.core import loader, native
from ggml_kvq.errors import ArgumentTypeError, BudgetError, DownloadError, KvqError, MethodError, StateError
from ggml_kvq.evaluate import specs
from ggml_kvq.launch import launcher
from test_sliding_windows import gemma3

DEMO = ROOT / "models/kvq-demo-q8_0.gguf"


def refusal(*argv: str) -> str:
    with pytest.raises(KvqError) as e:
        launcher.command("llama-cli", argv, {})
    assert "\n" not in str(e.value)
    return str(e.value)


def planned(model: Path, n_ctx: int, *caches: str) -> list[info.Plan]:
    return info.plans(gguf_header.read(model, tensors=True), n_ctx, [specs.parse(text) for text in caches])


# ------------------------------------------------------------------ figures before the first use and after it


@pytest.mark.parametrize("bits", [1.7, 2.75, 4.25])
def test_info_counts_what_the_cache_then_takes(demo_model: Path, bits: float) -> None:
    """Halves of keys, which a model's first use finds, were not counted: --kv-bits 1 was planned and then refused."""
    with Model(demo_model, kv_bits=bits, n_ctx=1024) as model:
        taken = model.kv_stats()["bytes_total"]
    (plan,) = planned(demo_model, 1024, f"auto:bits={bits}")
    assert (plan.bytes_total, plan.measures) == (taken, False)


def test_info_counts_data_of_a_sidecar(demo_model: Path, tmp_path: Path) -> None:
    sidecar = tmp_path / "own.kvq.gguf"
    fitted = means.fit(demo_model, (ROOT / "README.md").read_text(), n_sequences=1, length=256, n_threads=1)
    files.write_sidecar(sidecar, files.fields(demo_model, fitted, 4), files.arrays(fitted))
    with Model(demo_model, "auto", "bits=2.75", sidecar, n_ctx=1024) as model:
        taken = model.kv_stats()["bytes_total"]
    (plan,) = planned(demo_model, 1024, f"auto:bits=2.75@{sidecar}")
    assert (plan.bytes_total, plan.measures) == (taken, False)


def test_a_model_that_was_never_used_is_planned_nearly(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    default_means.ensure(demo_model, lambda _: None)
    (after,) = planned(demo_model, 4096, "auto:bits=2.75")
    monkeypatch.setenv("KVQ_CACHE_DIR", str(tmp_path))
    (before,) = planned(demo_model, 4096, "auto:bits=2.75")
    assert before.measures and before.bytes_total == pytest.approx(
        after.bytes_total, rel=0.15
    )  # coordinates are not known
    assert cli.main(["info", "-m", str(demo_model), "--cache", "auto:bits=2.75"]) == 0
    assert "auto: the first use of this model measures it, which may change these figures" in capsys.readouterr().out
    assert cli.main(["info", "-m", str(demo_model), "--cache", "kivi"]) == 0
    assert "first use" not in capsys.readouterr().out
    assert not list(tmp_path.iterdir())  # planning measures nothing


def test_plan_says_why_nothing_fits(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "-m", str(demo_model), "--memory", "900M", "--cache", "f16"]) == 0
    assert f"{demo_model.stem} does not fit into 900M: 12 MiB of weights and --reserve 1G" in capsys.readouterr().out


# ------------------------------------------------------------------ sizes and names


def test_a_size_of_a_few_bytes_lacks_its_unit(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--kv-budget 2 is 2 bytes: write the unit, for example --kv-budget 2G"
    assert words in refusal("-m", str(demo_model), "--kv-budget", "2")
    with pytest.raises(BudgetError, match="kv_budget=2 is 2 bytes: write the unit, for example kv_budget='2G'"):
        Model(demo_model, kv_budget=2)
    assert cli.main(["plan", "--memory", "8"]) != 0
    assert "--memory 8 is 8 bytes: write the unit, for example --memory 8G" in capsys.readouterr().err


def test_a_budget_that_is_too_small_is_told_the_least(demo_model: Path) -> None:
    said = refusal("-m", str(demo_model), "--kv-budget", "100K")
    assert "--kv-budget 100K: 100 KiB hold no context at 2.5 bits, where 256 tokens take " in said
    least = said.split("tokens take ")[1].split(":")[0].replace(" KiB", "K")
    got = launcher.command("llama-cli", ["-m", str(demo_model), "--kv-budget", least], {})
    assert got.args[got.args.index("-c") + 1] == "256"


def test_a_budget_that_no_context_fits_says_so_in_words(demo_model: Path) -> None:
    """It said "give at least 11 MiB (2.09 bits), no context fits it"."""
    said = refusal("-m", str(demo_model), "--kv-budget", "20K", "-c", "4096")
    assert said.endswith(" bits at these 4096 tokens); a shorter one does not fit either")


def test_bits_that_halves_of_keys_cannot_do_with_name_what_can() -> None:
    """Planned with whole keys before a model's first use, refused with halves after it, without a word of the cure."""
    lib = loader.libraries().need_kvq()
    layers = [(i, 3, 64, 64) for i in range(30)]
    for words in ("bits=1.3,pairs=sorted", "bits=1.3,pairs=sorted,order=none"):
        with pytest.raises(MethodError, match=r"or set pairs=none: whole keys can do with fewer bits$"):
            native.plan(lib, "auto", words, layers, 8192)
    assert native.plan(lib, "auto", "bits=1.3,pairs=none", layers, 8192)["bits"] > 1.3  # with its window
    with pytest.raises(MethodError, match="ask for that many or more$"):
        native.plan(lib, "auto", "bits=0.6,pairs=sorted", layers, 8192)


def test_python_is_not_told_to_write_a_flag(demo_model: Path) -> None:
    with pytest.raises(BudgetError, match=r"^kv_budget=2M: .*or the longest context for it, n_ctx=\d+$"):
        Model(demo_model, kv_budget="2M", n_ctx=4096)


def test_a_budget_that_holds_an_exact_cache_says_so(demo_model: Path) -> None:
    def notes(room: str) -> str:
        argv = ["-m", str(demo_model), "--kv-budget", room, "-c", "4096"]
        return "\n".join(launcher.command("llama-cli", argv, {}).notes)

    assert "--kv-budget 1G holds an exact cache too, of 25 MiB: --kv-method f16" in notes("1G")
    assert "exact" not in notes("20M")


def test_types_of_llama_cpp_are_no_methods(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal("-m", str(demo_model), "--kv-method", "q8_0")
    assert said.endswith("is a type of llama.cpp's own cache: drop it and write -ctk q8_0 -ctv q8_0")
    with pytest.raises(MethodError, match="pass kv_method='upstream', type_k='q8_0', type_v='q8_0'"):
        Model(demo_model, "q8_0")
    assert cli.main(["info", "-m", str(demo_model), "--cache", "q8_0"]) != 0
    assert "q8_0 is a type of llama.cpp's own cache; write upstream:q8_0" in capsys.readouterr().err


def test_a_number_and_an_option_are_named_as_they_were_given(demo_model: Path) -> None:
    """It said that --kv-opt names bits=2 and bits=3, of which the second was --kv-bits."""
    said = refusal("-m", str(demo_model), "--kv-method", "auto", "--kv-opt", "bits=2", "--kv-bits", "3")
    assert said == "--kv-bits 3 and --kv-opt bits=2 both say how many bits: drop one"
    launcher.command("llama-cli", ["-m", str(demo_model), "--kv-opt", "bits=3", "--kv-bits", "3"], {})


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("kivi,bits=2", "kivi:bits=2"),
        ("kivi bits=2", "kivi:bits=2"),
        ("kivi:bits=2:group=64", "kivi:bits=2,group=64"),
        ("=kivi", "kivi"),
        ("own=kivi bits=2", "own=kivi:bits=2"),
    ],
)
def test_a_cache_that_is_written_in_another_way(text: str, meant: str) -> None:
    """They were unknown methods, or values of a wrong type."""
    with pytest.raises(MethodError, match=f"; write {meant.removeprefix('own=')}$"):
        specs.parse(text)
    specs.parse(meant)


@pytest.mark.parametrize("argv", [["info", "--bits", "3"], ["plan", "--ctx", "4k"], ["plugin", "kivi"]])
def test_an_unknown_flag_sends_to_the_help_that_has_them(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """It sent to `ggml-kvq --help`, which has no flags."""
    with pytest.raises(SystemExit) as e:
        cli.main(argv)
    said = capsys.readouterr().err
    assert e.value.code == 2 and f"ggml-kvq {argv[0]}: error: unknown: " in said
    assert said.endswith(f"(ggml-kvq {argv[0]} --help tells more)\n")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("smollm", "smollm2"),
        ("smolm2", "smollm2"),
        ("qwen", "qwen2.5-coder"),
        ("Gemma3:Q4_K_M", "gemma3"),
        ("nosuch", None),
        ("smollm.gguf", None),
        ("folder/smollm", None),
        ("", None),
    ],
)
def test_a_name_that_is_nearly_one(text: str, meant: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert named.near(text) == meant
    if meant:
        words = f"{text} is no file: write -m {meant} for the model of that name"
        assert words in refusal("-m", text, "--kv-bits", "4")
        with pytest.raises(DownloadError, match=f"is no file: write {meant} for the model of that name"):
            Model(text)
        assert cli.main(["info", "-m", text]) != 0 and f"write {meant}" in capsys.readouterr().err


def test_bench_beyond_what_a_model_was_trained_for_says_so(
    write_gguf: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """It read a hundred thousand tokens of a model of 8192 without a word."""
    model = write_gguf("small.gguf", LLAMA_FIELDS, n_tensors=0)
    cli.main(["bench", "-m", str(model), "--cache", "kivi", "-d", "0,4096"])
    assert "warning: -d 4096 goes beyond the 2048 tokens that the model was trained for" in capsys.readouterr().err


def test_a_preset_names_no_flag_of_ours(demo_model: Path, tmp_path: Path) -> None:
    """llama.cpp ended with "option 'kv-method' not recognized", and nobody said where it goes."""
    preset = tmp_path / "models.ini"
    preset.write_text(f"[*]\nc = 1024\nkv-unified = true\n[small]\nmodel = {demo_model}\n")
    argv = ["--models-preset", str(preset)]
    assert launcher.command("llama-server", [*argv, "--kv-method", "kivi"], {}).env["KVQ_METHOD"] == "kivi"
    preset.write_text(preset.read_text() + "kv-bits = 3.5\n")
    with pytest.raises(KvqError, match="kv-bits = 3.5 is no option .* write --kv-bits 3.5 behind llama-server"):
        launcher.command("llama-server", argv, {})


# ------------------------------------------------------------------ Python


def test_a_refusal_is_not_that_of_a_call_before(demo_model: Path) -> None:
    """A context that llama.cpp could not make was explained by the error of an earlier call."""
    with pytest.raises(MethodError, match="option 'bits' has no value"):
        Model(demo_model, "kivi", "bits")
    with pytest.raises(KvqError) as e:
        Model(demo_model, "kivi", n_ctx=512, n_seq_max=1000)  # llama.cpp has 256 at most
    assert "option 'bits'" not in str(e.value)


def test_what_minikv_evicted_is_not_read_as_zeros(demo_model: Path, tmp_path: Path) -> None:
    """A state of minikv in a cache of another method: rows that are not there got attention, and the text was blank."""
    prompt = (Path(__file__).parent / "data" / "walk.txt").read_text()[:2400]
    state = tmp_path / "state"
    with Model(demo_model, "minikv", n_ctx=1024) as model:
        "".join(model.generate(prompt, max_tokens=4, temperature=0))
        model.save_state(state)
        model.load_state(state)
    for method in ("kivi", "f16", "specache"):
        with Model(demo_model, method, n_ctx=1024) as model:
            with pytest.raises(StateError, match="of cells that were evicted: restore it with its method"):
                model.load_state(state)
            assert "".join(model.generate("The file", max_tokens=4, temperature=0))


def test_one_text_is_not_a_list_of_letters(demo_model: Path) -> None:
    words = "prompts='abc' is one text; pass a list of texts"
    with Model(demo_model, "f16", n_ctx=256) as model, pytest.raises(ArgumentTypeError, match=words):
        model.generate_many("abc")


# ------------------------------------------------------------------ the third walk: numbers of bits and bytes


@pytest.fixture
def halved(tmp_path: Path) -> Path:
    """A model whose first use found sorted halves of keys: a copy with such data beside it."""
    copy = tmp_path / "halved.gguf"
    shutil.copy(DEMO, copy)
    fitted = means.fit(copy, (ROOT / "README.md").read_text(), n_sequences=1, length=256, n_threads=1)
    fitted.pairs = "sorted"
    meta = {**files.fields(copy, fitted, 4), "kvq.auto.order": fitted.climb}
    files.write_sidecar(tmp_path / "halved.kvq.gguf", meta, files.arrays(fitted))
    return copy


def test_the_least_bits_that_are_named_are_taken(halved: Path) -> None:
    """ "1.44 are the least", said the launcher, and the library, behind it, that 1.45 were."""
    said = refusal("-m", str(halved), "--kv-bits", "1.25", "-c", "512")
    least = float(re.findall(r"bits are not possible: (\d\.\d\d) are the least", said)[0])
    assert f"--kv-bits 1.25: 1.25 bits are not possible: {least:.2f} are the least" in said
    assert launcher.command("llama-cli", ["-m", str(halved), "--kv-bits", str(least), "-c", "512"], {}).args
    Model(halved, kv_bits=least, n_ctx=512, n_threads=1).close()
    with pytest.raises(BudgetError, match=f"^kv_bits=1.25: 1.25 bits are not possible: {least:.2f} are the least"):
        Model(halved, kv_bits=1.25, n_ctx=512)
    refusal("-m", str(halved), "--kv-bits", f"{least - 0.02:.2f}", "-c", "512")  # and nothing is loaded for it


def test_the_refusal_names_whole_keys_in_the_words_of_who_asked(
    halved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It did not name them, because the order of the data is none of their ladder."""
    said = refusal("-m", str(halved), "--kv-bits", "1.25")
    assert said.endswith(", or write --kv-opt pairs=none: whole keys can do with fewer bits")
    launcher.command("llama-cli", ["-m", str(halved), "--kv-bits", "1.25", "--kv-opt", "pairs=none"], {})
    with pytest.raises(BudgetError, match="or pass kv_opts='pairs=none': whole keys can do with fewer bits$"):
        Model(halved, kv_bits=1.25, n_ctx=512)
    Model(halved, kv_bits=1.25, kv_opts="pairs=none", n_ctx=512, n_threads=1).close()
    (tmp_path / "text").write_text("a few words. " * 600)
    argv = ["-m", str(halved), "-f", str(tmp_path / "text"), "-c", "512", "-o", str(tmp_path / "out.jsonl")]
    cache = f"auto:bits=1.25@{tmp_path / 'halved.kvq.gguf'}"
    assert cli.main(["eval", *argv, "--cache", cache]) == 2
    said = capsys.readouterr().err
    assert f"cache '{cache}': 1.25 bits are not possible" in said and "or write auto:bits=1.25,pairs=none: " in said
    assert "f16 base" not in said  # it ran the reference first


def test_more_bits_than_auto_has_are_told_so(demo_model: Path) -> None:
    """--kv-bits 16 gave 4.2 bits in silence."""

    def notes(bits: str) -> str:
        return "\n".join(launcher.command("llama-cli", ["-m", str(demo_model), "--kv-bits", bits], {}).notes)

    assert "auto ends at 5 bits; for more: --kv-method kivi --kv-opt bits=4, or --kv-method f16" in notes("8")
    assert "ends at" not in notes("4.25")
    words = r"kv_bits=16: auto ends at 5 bits; for more pass kv_method='kivi', kv_opts=\{'bits': 4\}"
    with pytest.warns(UserWarning, match=words):
        model = Model(demo_model, kv_bits=16, n_ctx=512, n_threads=1)
    with model:
        assert "; auto ends at 4.9" in model.load_line or "; auto ends at 5.0" in model.load_line
    with Model(demo_model, kv_bits=6, n_ctx=512, n_threads=1) as model:  # "5 bits count at 131072 tokens" stood there
        assert "; auto ends at " in model.load_line and "count at" not in model.load_line
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Model(demo_model, kv_bits=4.25, n_ctx=512, n_threads=1) as model:
            assert "ends at" not in model.load_line


def test_a_budget_is_told_in_bits_of_codes_and_of_all(demo_model: Path) -> None:
    """ "6144 KiB at 2.5 bits" stood beside a load line that said 3.83."""
    got = launcher.command("llama-cli", ["-m", str(demo_model), "--kv-budget", "2M"], {})
    note = next(n for n in got.notes if n.startswith("--kv-budget"))
    found = re.fullmatch(
        r"--kv-budget: 2048 KiB: (\d+) tokens at codes of 2.5 bits \((\d\.\d\d) with their window\);"
        r" up to -c (\d+) with fewer bits",
        note,
    )
    assert found and got.args[got.args.index("-c") + 1] == found[1], note
    (plan,) = planned(demo_model, int(found[1]), "auto:bits=2.5")
    assert plan.bits == pytest.approx(float(found[2]), abs=0.01)
    argv = ["-m", str(demo_model), "--kv-budget", "2M", "-c"]
    launcher.command("llama-cli", [*argv, found[3]], {})
    refusal(*argv, str(int(found[3]) + 256))


def test_the_bits_of_a_refused_budget_are_of_that_context(demo_model: Path) -> None:
    said = refusal("-m", str(demo_model), "--kv-budget", "500K", "-c", "2048")
    assert re.search(r"give at least \d+ KiB \(\d\.\d\d bits at these 2048 tokens\); a shorter", said), said


def test_a_size_is_written_as_it_is_given(demo_model: Path) -> None:
    """64 of a cache are MiB; Python was told `kv_budget 1000G`, and that 1.5 is 1 bytes."""
    words = "--kv-budget 64 is 64 bytes: write the unit, for example --kv-budget 64M"
    assert refusal("-m", str(demo_model), "--kv-budget", "64") == words
    for given, said in (
        (1000, "kv_budget=1000 is 1000 bytes: write the unit, for example kv_budget='1000M'"),
        (1.5, "kv_budget=1.5 is 1.5 bytes: write the unit, for example kv_budget='1.5G'"),
        ("x", "kv_budget='x' is no size; write for example kv_budget='2G' or kv_budget='800M'"),
    ):
        with pytest.raises(BudgetError) as e:
            Model(demo_model, kv_budget=given)  # type: ignore[arg-type]
        assert str(e.value) == said
    with pytest.raises(BudgetError, match=r"^kv_bits=40 is no number of bits from 0.5 to 16; .* kv_bits=2.5$"):
        Model(demo_model, kv_bits=40)


# ------------------------------------------------------------------ the third walk: load lines and cures


def test_the_default_of_bits_is_told(demo_model: Path) -> None:
    """A tuned model with its data inside chose 2.5 bits, and its line did not say so."""
    with Model(demo_model, "auto", n_ctx=1024, n_threads=1) as model:
        assert re.search(r"; 2\.5 bits, the default, count at 131072 tokens: these 1024 take", model.load_line)
    with Model(demo_model, "auto", "bits=2.5", n_ctx=1024, n_threads=1) as model:
        assert "default" not in model.load_line and "; 2.5 bits count at 131072 tokens" in model.load_line


def test_two_caches_of_a_model_are_told_apart_to_the_end(demo_model: Path, tmp_path: Path) -> None:
    """Closing lines came in the other order than load lines; and "1 layers"."""
    model = gemma3(demo_model, tmp_path / "m.gguf", None)
    argv = ["-m", str(model), "--kv-method", "kivi", "-p", "a", "-n", "1", "-c", "512", "-no-cnv", "-t", "1"]
    code = "import sys; from ggml_kvq.launch import launcher; sys.exit(launcher.llama_completion())"
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=120, check=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("ggml-kvq: kivi")]
    for part in ("1 of 7 layers", "6 of 7 layers"):
        assert [part in line for line in lines].count(True) == 2, lines
        assert any(line.startswith(f"ggml-kvq: kivi: {part}: ") for line in lines), lines
    assert "1 layers" not in done.stderr


def test_a_sidecar_of_another_model_beside_it_can_be_left_aside(demo_model: Path, tmp_path: Path) -> None:
    """ "make it again with ggml-kvq calibrate" was the only cure of a file that nobody had asked for."""
    model = tmp_path / "m.gguf"
    shutil.copy(demo_model, model)
    fitted = means.fit(demo_model, (ROOT / "README.md").read_text(), n_sequences=1, length=256, n_threads=1)
    other = {**files.fields(demo_model, fitted, 4), "kvq.model.hash": "0"}
    files.write_sidecar(tmp_path / "m.kvq.gguf", other, files.arrays(fitted))
    with pytest.raises(MethodError, match="or leave it aside with kv_config='none'$"):
        Model(model, "aqua", n_ctx=256)
    argv = ["-m", str(model), "-p", "a", "-n", "1", "-c", "256", "-no-cnv", "-t", "1"]
    code = "import sys; from ggml_kvq.launch import launcher; sys.exit(launcher.llama_completion())"
    call = [sys.executable, "-c", code, *argv, "--kv-method", "aqua"]
    said = subprocess.run(call, capture_output=True, text=True, timeout=120, check=False).stderr
    assert "or leave it aside with --kv-config none" in said
    call[-1:] = ["aqua", "--kv-config", "none"]
    said = subprocess.run(call, capture_output=True, text=True, timeout=120, check=False).stderr
    assert "(ggml-kvq calibrate makes it), or write --kv-opt predictor=none" in said  # and not "set predictor=none"


def test_plugin_says_what_the_program_wants_besides(capsys: pytest.CaptureFixture[str]) -> None:
    """Without these two flags the cache stays f16 in silence."""
    assert cli.main(["plugin"]) == 0
    got = capsys.readouterr()
    assert (
        got.err == "# start the program with -dev KVQ0 -fa on: without them its cache stays f16, and nothing says so\n"
    )
    assert got.out.count("\n") == 2 and "#" not in got.out


def test_a_server_whose_port_is_taken_leaves_no_page(demo_model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        argv = ["-m", str(demo_model), "--port", str(taken.getsockname()[1]), "--kv-method", "kivi", "-c", "512"]
        code = "import sys; from ggml_kvq.launch import launcher; sys.exit(launcher.llama_server())"
        env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", code, *argv], env=env, capture_output=True, timeout=120, check=False
        )
    assert done.returncode != 0 and not list(tmp_path.iterdir()), done.stderr[-500:]
