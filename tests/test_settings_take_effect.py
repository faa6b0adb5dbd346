"""What was asked for is what runs, or one line says why not: memory, devices, files, and what an evaluation
measures.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import LLAMA_FIELDS, run_python
from ggml_kvq import Model, _paths, bench, cli, files, gguf_header, memory
from ggml_kvq.errors import KvqError
from ggml_kvq.launch import flags, launcher, refusals

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = "import sys; from ggml_kvq.launch.launcher import run; sys.exit(run(sys.argv[1], sys.argv[2:]))"
CLI = "import sys; from ggml_kvq.cli import main; sys.exit(main(sys.argv[1:]))"


def launch(program: str, *argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return run_python(LAUNCH, program, *argv, env=env, stdin=subprocess.DEVNULL)


def refusal(*argv: str, program: str = "llama-completion", env: dict[str, str] | None = None) -> str:
    with pytest.raises(KvqError) as e:
        launcher.command(program, argv, env or {})
    assert "\n" not in str(e.value)
    return str(e.value)


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize(
    ("files", "rooms"),
    [
        ({}, []),
        ({"/proc/self/cgroup": "0::/\n"}, []),
        (  # a container sees its own group as the root
            {
                "/proc/self/cgroup": "0::/\n",
                "/sys/fs/cgroup/memory.max": "1000\n",
                "/sys/fs/cgroup/memory.current": "900\n",
                "/sys/fs/cgroup/memory.stat": "anon 700\nactive_file 100\ninactive_file 50\n",
            },
            [150],
        ),
        (  # a group above limits it, its own does not
            {
                "/proc/self/cgroup": "1:name=systemd:/x\n0::/user/a\n",
                "/sys/fs/cgroup/user/memory.max": "500\n",
                "/sys/fs/cgroup/user/memory.current": "600\n",
                "/sys/fs/cgroup/user/a/memory.max": "max\n",
                "/sys/fs/cgroup/user/a/memory.current": "600\n",
            },
            [0],
        ),
        (  # version 1, whose root has no limit
            {
                "/proc/self/cgroup": "4:memory:/job\n0::/\n",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "/sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
                "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "500\n",
                "/sys/fs/cgroup/memory/job/memory.usage_in_bytes": "400\n",
                "/sys/fs/cgroup/memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 60\n",
            },
            [160],
        ),
    ],
)
def test_control_groups_limit_memory(files: dict[str, str], rooms: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as kvq_host_available() in C++ (tests/native/test_store.cpp)."""
    monkeypatch.setattr(memory, "_text", lambda path: files.get(str(path), ""))
    assert memory._group_rooms() == rooms


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["-c", "20000000", "--kv-method", "kivi"],
            ["-c 20000000", "--kv-method kivi", "needs", "free", "the longest context is -c "],
        ),
        (["-c", "2000M", "--kv-method", "xquant"], ["needs", "the longest context is -c "]),
        (["-c", "4096", "-fitt", "99999999", "--kv-method", "kivi"], ["less 99999999 MiB of -fitt", "lower -fitt"]),
        (["-fitt", "99999999", "--kv-method", "kivi"], ["the model's context of 4096 tokens", "lower -fitt"]),
        (["-c", "-1", "--kv-method", "kivi"], ["-c -1 is no number of tokens"]),
        (["-b", "0", "--kv-method", "kivi"], ["-b 0"]),
    ],
)
def test_a_context_that_does_not_fit_is_refused_before_the_load(
    demo_model: Path, argv: list[str], words: list[str]
) -> None:
    """llama.cpp's --fit would move layers off KVQ0 and keep their cache as f16, without a word."""
    done = launch("llama-completion", "-m", str(demo_model), "-no-cnv", "-n", "1", "-p", "hi", *argv)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr[-2000:]
    assert all(word in done.stderr for word in words), done.stderr


def test_the_longest_context_is_the_longest(demo_model: Path) -> None:
    facts = memory.model(demo_model)
    assert facts is not None and facts.n_ctx_train == 4096 and len(facts.full) == 12
    plan = memory.planner("kivi", "bits=2", facts.n_layer)
    for free in (64 << 20, 900 << 20, 24 << 30):
        for n_stream in (1, 4):
            n = memory.longest(facts, plan, free, n_stream=n_stream)
            assert n and n % (256 * n_stream) == 0
            assert memory.need(facts, plan, n, n_stream=n_stream).total <= free
            assert memory.need(facts, plan, n + 256 * n_stream, n_stream=n_stream).total > free
    assert memory.longest(facts, plan, 1 << 20) == 0


def test_the_models_own_context_is_shortened_aloud(demo_model: Path) -> None:
    facts = memory.model(demo_model)
    assert facts is not None
    choice = refusals.Choice("f16", "--kv-method f16")
    user = flags.User(["-fitt", "0", "-fitc", "256"], {}, reads_env=True)
    free = memory.need(facts, memory.planner("f16", "", 12), 2048).total
    added, notes, _ = refusals.fit("llama-server", user, choice, str(demo_model), "", lambda: free)
    assert added == ["-fit", "off", "-c", "2048"]
    assert "4096 tokens" in notes[0] and "-c 2048 is used" in notes[0]
    with pytest.raises(KvqError, match="-c 0, the model's context of 4096 tokens .* the longest context is -c 2048"):
        refusals.fit(
            "llama-server",
            flags.User(["-c", "0", "-fitt", "0"], {}, reads_env=True),
            choice,
            str(demo_model),
            "",
            lambda: free,
        )


@pytest.mark.parametrize("method", ["kivi", "minikv", "specache"])
@pytest.mark.parametrize("gpu", [False, True])
def test_what_fits_is_decided_by_compressed_sizes(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, method: str, gpu: bool
) -> None:
    """On a CPU by us: what an f16 cache would not leave room for runs. On a GPU llama.cpp's own --fit asks our buffer
    type, which tells compressed sizes; the launcher neither switches it off nor holds host memory against the cache.
    """
    facts = memory.model(demo_model)
    assert facts is not None
    opts = "place=/tmp" if method == "specache" else ""
    exact, ours = (memory.need(facts, memory.planner(m, o, 12), 65536).total for m, o in (("f16", ""), (method, opts)))
    assert ours < exact
    monkeypatch.setattr(refusals, "on_gpu", lambda: gpu)
    real: Any = refusals.fit
    for free, runs in (((ours + exact) // 2, True), (ours // 2, gpu)):
        monkeypatch.setattr(refusals, "fit", lambda *a, f=free: real(*a, lambda: f))
        argv = ["-m", str(demo_model), "--kv-method", method, "-c", "65536", "-fitt", "0"]
        argv += ["--kv-opt", opts] if opts else []
        if not runs:
            with pytest.raises(KvqError, match="the longest context is -c"):
                launcher.command("llama-completion", argv, {})
            continue
        got = launcher.command("llama-completion", argv, {}).args
        assert ("-fit" in got) != gpu
        assert got[got.index("-c") + 1] == "65536"


def test_what_the_plan_says_is_what_is_allocated(demo_model: Path) -> None:
    facts = memory.model(demo_model)
    assert facts is not None
    for method in ("kivi", "xquant", "higgs"):
        with Model(demo_model, method, n_ctx=8192) as m:
            assert memory.need(facts, memory.planner(method, "", 12), 8192).cache == m.kv_stats()["bytes_total"]


def test_layers_without_attention_and_windows_are_not_counted(write_gguf: Callable[..., Path]) -> None:
    pattern = {"llama.attention.sliding_window": 512, "llama.attention.sliding_window_pattern": [1, 1, 1, 0]}
    facts = memory.model(write_gguf("w.gguf", {**LLAMA_FIELDS, **pattern}))
    assert facts is not None and (len(facts.full), len(facts.windowed), facts.window) == (1, 3, 512)
    plan = memory.planner("kivi", "", 4)
    assert memory.need(facts, plan, 65536).cache < plan(facts.full, 65536, 1) * 1.1
    tensors = tuple(
        gguf_header.Tensor(f"blk.{il}.{kind}.weight", (32,), 0)
        for il, kind in [(0, "ssm_in"), (1, "attn_k"), (2, "ssm_in"), (3, "attn_k")]
    )
    header = gguf_header.Header("h.gguf", 3, 4, LLAMA_FIELDS, tensors)
    assert [s[0] for s in gguf_header.attention_layers(header)] == [1, 3]


def test_sizes_of_tokens() -> None:
    assert [memory.tokens(t) for t in ("32768", "32k", "1.5K", "1M")] == [32768, 32768, 1536, 1048576]
    got = launcher.command("llama-cli", ["-c", "2k", "-n", "1K", "-p", "32k", "--kv-method", "f16"], {}).args
    assert got[-6:] == ["-c", "2048", "-n", "1024", "-p", "32k"]  # a prompt stays text
    assert launcher.command("llama-bench", ["-d", "1k,2k", "-p", "0"], {}).args == ["-d", "1024,2048", "-p", "0"]
    assert "1.0001k" in refusal("-c", "1.0001k")


def test_the_load_line_counts_the_layers(demo_model: Path) -> None:
    argv = ["-m", str(demo_model), "-no-cnv", "-n", "1", "-p", "hi", "-c", "512", "--kv-method"]
    done = launch("llama-completion", *argv, "f16", "-ngl", "9")
    assert re.search(r"ggml-kvq: f16, .*; 8 of 12 layers", done.stderr), done.stderr[-2000:]
    for more in [], ["-ngl", "9"]:  # the caches of a method that saves memory stay together
        done = launch("llama-completion", *argv, "kivi", *more)
        assert "of 12 layers;" not in done.stderr and "512 tokens, device KVQ0" in done.stderr
        assert "no page was sealed" in done.stderr


# ------------------------------------------------------------------ devices


@pytest.mark.parametrize("away", [["-dev", "none"], ["-ngl", "0"], ["-nkvo", "1"]])
def test_a_method_that_no_cache_uses_is_said(demo_model: Path, away: list[str]) -> None:
    """A program of the user's own, by environment: the library is loaded, the cache lies elsewhere."""
    env = {**os.environ, "GGML_BACKEND_PATH": str(_paths.backend()), "KVQ_METHOD": "kivi"}
    argv = [str(_paths.program("llama-bench")), "-m", str(demo_model), "-n", "1", "-p", "0", "-r", "1", *away]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=True)
    lines = [line for line in done.stderr.splitlines() if "no cache landed on KVQ0" in line]
    assert len(lines) == 1 and "KVQ_METHOD=kivi" in lines[0] and "-dev KVQ0" in lines[0], done.stderr
    done = subprocess.run(argv[: -len(away)], env=env, capture_output=True, text=True, timeout=120, check=True)
    assert "no cache landed" not in done.stderr and "ggml-kvq: kivi" in done.stderr


def test_a_split_that_keeps_every_cache_away_is_refused(demo_model: Path) -> None:
    done = launch(
        "llama-completion", "-m", str(demo_model), "-no-cnv", "-n", "1", "-p", "hi", "--kv-method", "kivi", "-sm", "row"
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "-sm row" in done.stderr
    assert "write -sm layer, -sm tensor" in done.stderr
    assert "-sm row" in refusal("--kv-method", "kivi", env={"LLAMA_ARG_SPLIT_MODE": "row"})
    assert "-sm row" in refusal("--kv-method", "kivi", "-sm", "layer,row", program="llama-bench")
    taken = launcher.command("llama-cli", ["-m", str(demo_model), "--kv-method", "kivi", "-sm", "tensor"], {})
    assert "KVQ_METHOD" in taken.env and "write -dev KVQ0,KVQ1" in taken.notes[0]


def test_none_is_an_off_switch(write_gguf: Callable[..., Path], demo_model: Path) -> None:
    named = str(write_gguf("m.gguf", {**LLAMA_FIELDS, "kvq.method": "kivi"}))
    assert launcher.command("llama-cli", ["-m", named], {}).env["KVQ_METHOD"] == "kivi"
    assert launcher.command("llama-cli", ["-m", named, "--kv-method", "none"], {}).args == ["-m", named]
    env = {"KVQ_METHOD": "kivi", "KVQ_OPTS": "bits=2", "GGML_BACKEND_PATH": str(_paths.backend())}
    got = launcher.command("llama-bench", ["--kv-method", "none"], env).env
    assert got == {"KVQ_METHOD": None, "KVQ_OPTS": None, "GGML_BACKEND_PATH": None}
    assert launcher.command(
        "llama-bench", ["--kv-method", "none"], {**env, "GGML_BACKEND_PATH": "/other.so"}
    ).env.keys() == {"KVQ_METHOD", "KVQ_OPTS"}
    assert "needs a method" in refusal("--kv-method", "none", "--kv-opt", "bits=2")
    with Model(demo_model, "none", n_ctx=256) as m:
        assert m.kv_method is None


def test_refusals_name_what_chose_the_method(write_gguf: Callable[..., Path]) -> None:
    assert "KVQ_CONFIG=/nope is not a file" in refusal(env={"KVQ_CONFIG": "/nope"})
    named = str(write_gguf("m.gguf", {**LLAMA_FIELDS, "kvq.method": "kivi"}))
    text = refusal("-m", named, "-ctk", "bf16")
    assert (
        "the model's metadata" in text
        and named in text
        and "--kv-method none" in text
        and "--kv-method kivi" not in text
    )
    assert "KVQ_METHOD=kivi" in refusal("-ctk", "bf16", env={"KVQ_METHOD": "kivi"})
    assert "drop one of them" in refusal("-ctk", "bf16", "--kv-method", "kivi")


# ------------------------------------------------------------------ errors at load


def test_a_missing_or_cut_model_is_one_line(demo_model: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(demo_model.read_bytes()[:3_000_000])
    for method in ([], ["--kv-method", "kivi"]):
        for path, word in (("/nonexistent", "does not exist"), (str(cut), "is cut off")):
            done = launch("llama-completion", "-m", path, "-no-cnv", "-p", "hi", *method)
            assert (
                done.returncode == 2 and done.stderr.count("\n") == 1 and word in done.stderr and path in done.stderr
            ), done.stderr
    assert cli.main(["info", str(cut)]) == 2


@pytest.mark.parametrize("program", ["llama-completion", "llama-server", "llama-bench"])
def test_a_cache_that_is_refused_at_load_is_one_line(demo_model: Path, program: str) -> None:
    argv = [
        "-m",
        str(demo_model),
        "--kv-method",
        "aqua",
        *(["-n", "1", "-p", "0"] if program == "llama-bench" else ["-c", "512"]),
    ]
    done = launch(program, *argv, *(["--port", "1"] if program == "llama-server" else []))
    lines = [line for line in done.stderr.splitlines() if " E " in line or "rror" in line]
    assert (
        done.returncode == 1
        and len(lines) == 1
        and lines[0].startswith("ggml-kvq: error: method aqua needs calibrated data")
    ), done.stderr


# ------------------------------------------------------------------ files

LIMITED = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    out = tmp_path_factory.mktemp("sidecar") / "x.kvq.gguf"
    assert cli.main(["calibrate", "-m", str(demo_model), "--method", "xquant", "-o", str(out)]) == 0
    return out


def one_line(done: subprocess.CompletedProcess[str], path: Path) -> str:
    said = [x for x in done.stderr.splitlines(keepends=True) if not x.startswith("reading ")]  # progress of embed
    assert done.returncode == 2 and len(said) == 1, done.stderr
    assert str(path) in said[0]
    return said[0]


def test_a_full_disk_leaves_no_half_model(demo_model: Path, sidecar: Path, tmp_path: Path) -> None:
    out = tmp_path / "embedded.gguf"
    text = one_line(run_python(LIMITED + CLI, "embed", str(demo_model), str(sidecar), str(out)), out)
    assert not list(tmp_path.iterdir())
    assert "needs 11.4 MiB" in text and "file size limit" in text


def test_a_disk_with_too_little_room_is_seen_first(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1 << 20}))
    with (
        pytest.raises(
            KvqError, match=r"x\.gguf could not be written, the disk is full: it needs 5\.0 MiB, 1\.0 MiB are free"
        ),
        files.whole(tmp_path / "x.gguf", need=5 << 20),
    ):
        raise AssertionError("nothing must be written")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_no_half_figure_and_no_half_row(tmp_path: Path) -> None:
    row = {"n_gen": 4, "n_prompt": 0, "n_depth": 0, "avg_ts": 1.0, "stddev_ts": 0.0, "cache": "f16"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    limit = LIMITED.replace("65536", "2048")
    out = tmp_path / "speed"
    one_line(run_python(limit + CLI, "plot", "speed", str(tmp_path / "rows.jsonl"), "-o", str(out)), out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.jsonl"]

    rows = tmp_path / "rows.jsonl"
    code = (
        limit
        + "from ggml_kvq import files\ntry:\n    files.append_line(sys.argv[1], 'x' * 4000)\nexcept Exception as e:"
        " print(e)"
    )
    before = rows.read_bytes()
    assert "4001 bytes" in run_python(code, str(rows)).stdout
    assert rows.read_bytes() == before


def test_files_replace_their_predecessor_only_when_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("old")
    with pytest.raises(ValueError, match="stop"), files.whole(path) as partial:
        partial.write_text("half")
        raise ValueError("stop")
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1
    with files.whole(path) as partial:
        partial.write_text("new")
    assert path.read_text() == "new" and len(list(tmp_path.iterdir())) == 1


def bench_rows(n: int) -> Callable[..., Any]:
    def rows(_model: Path, specs: Any, _settings: Any) -> Any:
        for i in range(n):
            yield {
                "n_gen": 4,
                "n_prompt": 0,
                "n_depth": i,
                "cache": specs[0].label,
                "avg_ts": 1.0,
                "stddev_ts": 0.0,
                "ratio": 1.0,
            }

    return rows


def test_bench_probes_its_output_first(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(bench, "run", lambda *_: pytest.fail("measured before the output was probed"))
    assert cli.main(["bench", "-m", str(demo_model), "-o", str(tmp_path / "file" / "x.jsonl")]) == 2
    assert "x.jsonl" in capsys.readouterr().err


def test_bench_shows_what_it_measured_whatever_happens(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "run", bench_rows(3))
    out = tmp_path / "x.jsonl"

    def full(path: object, line: str) -> None:
        if '"n_depth": 1' in line:
            raise KvqError(f"{path} could not be written, the disk is full")

    monkeypatch.setattr(files, "append_line", full)
    assert cli.main(["bench", "-m", str(demo_model), "-o", str(out)]) == 2
    got = capsys.readouterr()
    assert "tg4 @ 0" in got.out and "tg4 @ 1" in got.out and "the disk is full" in got.err


# ------------------------------------------------------------------ evaluation


def test_eval_checks_every_cache_first(
    demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ggml_kvq.evaluate.specs.CacheSpec.open", lambda *_, **__: pytest.fail("measured before the specs were checked")
    )
    text = tmp_path / "t.txt"
    text.write_text("word " * 4000)
    for spec, word in (
        ("kivy", "kivy"),
        ("kivi:bits=9", "bits=9"),
        ("aqua@/nowhere.gguf", "/nowhere.gguf"),
        ("upstream:q9", "q9"),
    ):
        assert (
            cli.main(["eval", "-m", str(demo_model), "-f", str(text), "--cache", spec, "-o", str(tmp_path / "r.jsonl")])
            == 2
        )
        got = capsys.readouterr().err
        assert word in got and got.count("\n") == 1
    assert not (tmp_path / "r.jsonl").exists()


def test_evals_default_reads_codes_and_says_when_not(
    demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "t.txt", tmp_path / "r.jsonl"
    text.write_text((ROOT / "examples/prompt.txt").read_text() * 6)
    argv = [
        "eval",
        "-m",
        str(demo_model),
        "-f",
        str(text),
        "-c",
        "512",
        "--chunks",
        "1",
        "-o",
        str(out),
        "--cache",
        "kivi:bits=2",
    ]
    assert cli.main(argv) == 0
    assert "warning" not in capsys.readouterr().err
    assert cli.main([*argv, "-ub", "512"]) == 0
    assert "only 0 % of what was scored read codes" in capsys.readouterr().err
    rows = {(r["key"]["cache"], r["key"]["n_ubatch"]): r for r in map(json.loads, out.read_text().splitlines())}
    good, none = rows["kivi:bits=2", 64], rows["kivi:bits=2", 512]
    assert good["read_codes"] == 1 and good["sealed"] > 0
    assert none["read_codes"] == 0 and none["kld_mean"] < good["kld_mean"]
    assert all("sealed" in r and "read_codes" in r for r in rows.values())
    assert cli.main(argv) == 0
    assert f"reused 2 rows of {out}, measured 0" in capsys.readouterr().err


# ------------------------------------------------------------------ README


@pytest.mark.parametrize("name", ["one", "card"])
def test_the_first_commands_read_codes(name: str, demo_model: Path) -> None:
    """The prompts of the README's commands are longer than the window. Command one's model is the demo model here."""
    text = (ROOT / "README.md").read_text()
    command = re.search(rf"<!-- command {name} -->\n```sh\n(.*)\n```", text)
    assert command
    words = shlex.split(command[1])
    words = words[words.index(".venv/bin/llama-cli") + 1 :]
    words[words.index("-m") + 1] = str(demo_model)
    at = words.index("-f")
    prompt = (ROOT / words[at + 1]).read_text()
    with Model(demo_model, n_ctx=256) as m:
        assert len(m.tokenize(prompt)) > 2 * 128
    argv = [sys.executable, "-c", LAUNCH, "llama-cli", *words]
    done = subprocess.run(
        argv, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=True
    )
    method = "auto" if name == "one" else "xquant"
    sealed = re.search(
        rf"ggml-kvq: {method}[^:]*: (\d+) pages sealed, about (\d+) tokens of every layer were read from codes",
        done.stderr,
    )
    assert sealed and int(sealed[2]) >= 256, done.stderr[-2000:]
    assert name == "one" or sealed[0] in text
    assert "with `--kv-method f16`" in text
