"""`ggml-kvq`: methods, info, and the contract that a subcommand is one module."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import LLAMA_FIELDS, gguf_bytes
from ggml_kvq import cli, gguf_header, info, methods
from ggml_kvq.evaluate import specs


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def test_methods_lists_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "methods")
    names = [row["name"] for row in methods.table()]
    assert code == 0 and {"f16", "kivi", "xquant"} <= set(names)
    assert [line.split()[0] for line in out.splitlines()[: len(names)]] == names


def test_methods_name_shows_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    for row in methods.table():
        code, out, _ = run(capsys, "methods", row["name"])
        assert code == 0 and row["paper"] in out
        lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
        for option in row["options"]:
            assert option["default_value"] in lines[option["key"]] and option["type"] in lines[option["key"]]
            methods.check(
                row["name"], f"{option['key']}={option['default_value']}"
            )  # what is printed as default is accepted
        got = json.loads(run(capsys, "methods", row["name"], "--json")[1])
        assert got == row


def test_unknown_method(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "methods", "nosuch")
    assert code == 2 and out == "" and err.count("\n") == 1 and "nosuch" in err and "kivi" in err


def test_info_of_the_demo_model(capsys: pytest.CaptureFixture[str], demo_model: Path) -> None:
    got = json.loads(run(capsys, "info", str(demo_model), "-c", "2048", "--json")[1])
    assert (got["architecture"], got["layers"], got["heads"], got["kv_heads"]) == ("llama", 12, 4, [2])
    assert (got["head_size_k"], got["k_width"], got["v_width"], got["n_ctx"]) == ([64], [128], [128], 2048)
    by_name = {p["method"]: p for p in got["methods"]}
    assert list(by_name) == [row["name"] for row in methods.table()]
    for plan in by_name.values():
        assert plan["refused"] == "" and plan["bytes_f16"] == 12 * 2048 * 2 * 128 * 2
        assert plan["bits"] == pytest.approx(plan["bytes_total"] * 8 / (12 * 2048 * 2 * 128))
    assert by_name["xquant"]["bits"] < by_name["kivi"]["bits"] < 5
    assert by_name["f16"]["bits"] >= 16

    code, out, _ = run(capsys, "info", str(demo_model))
    assert code == 0 and "4096 tokens" in out
    for name, plan in by_name.items():
        assert any(line.startswith(name) for line in out.splitlines()), plan


def test_info_shows_kvq_metadata(capsys: pytest.CaptureFixture[str], write_gguf: Callable[..., Path]) -> None:
    path = write_gguf("m.gguf", {**LLAMA_FIELDS, "kvq.method": "kivi", "kvq.kivi.group": 64, "kvq.blob": [7] * 5000})
    out = run(capsys, "info", str(path))[1]
    assert "kvq.kivi.group    64" in out and "kvq.method        kivi" in out and "[u32 x 5000]" in out
    sidecar = write_gguf("s.gguf", {"general.type": "kvq", "kvq.method": "aqua"})
    code, out, _ = run(capsys, "info", str(sidecar))
    assert code == 0 and "type              kvq" in out and "true bits" not in out.lower()


@pytest.mark.parametrize("name", ["missing.gguf", "folder", "text.gguf", "cut.gguf"])
def test_info_of_what_is_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.gguf").write_text("hello, this is no model")
    (tmp_path / "cut.gguf").write_bytes(gguf_bytes(LLAMA_FIELDS)[:60])
    code, out, err = run(capsys, "info", str(tmp_path / name))
    assert code == 2 and out == "" and err.count("\n") == 1 and name in err


def test_layers_without_attention_and_sliding_windows(write_gguf: Callable[..., Path]) -> None:
    fields = {**LLAMA_FIELDS, "llama.attention.head_count_kv": [2, 0, 1, 2], "llama.attention.key_length": 64}
    fields |= {
        "llama.attention.value_length": 32,
        "llama.attention.key_length_swa": 16,
        "llama.attention.sliding_window_pattern": [0, 0, 1, 0],
    }
    header = gguf_header.read(write_gguf("m.gguf", fields))
    assert gguf_header.attention_layers(header) == [(0, 2, 64, 32), (2, 1, 16, 32), (3, 2, 64, 32)]
    plans = {p.method: p for p in info.plans(header, 1024)}
    assert plans["f16"].bytes_f16 == 2 * 1024 * (2 * 96 + 48 + 2 * 96)


def test_header_reader_agrees_with_gguf_py(demo_model: Path) -> None:
    from gguf import GGUFReader

    theirs = GGUFReader(str(demo_model))
    ours = gguf_header.read(demo_model, tensors=True, max_array=1 << 30)
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert set(fields) == set(ours.fields)
    for key, field in fields.items():
        assert field.contents() == ours.fields[key], key
    assert [(t.name, tuple(map(int, t.shape)), int(t.tensor_type)) for t in theirs.tensors] == [
        (t.name, t.shape, t.type) for t in ours.tensors
    ]


def test_environment_report() -> None:
    got = subprocess.run([sys.executable, "-m", "ggml_kvq"], capture_output=True, text=True, timeout=120, check=False)
    assert got.returncode == 0, got.stdout
    for word in ("ggml-kvq", "cpu ", "libggml-kvq.so", "KVQ0"):
        assert word in got.stdout


@pytest.mark.parametrize("n_ctx", [100, 257, 1000])
def test_a_plan_is_of_the_cells_that_llama_cpp_makes(
    n_ctx: int, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """257 tokens take 512 cells: the plan said 1104 KiB where kivi took 1364."""
    header = gguf_header.read(demo_model)
    for text in ("kivi", "higgs", "minikv", "upstream:f16"):
        (plan,) = info.plans(header, n_ctx, [specs.parse(text)])
        with specs.parse(text).open(demo_model, n_ctx=n_ctx, n_threads=1) as m:
            s = m.kv_stats()
            assert (plan.bytes_total, plan.bytes_f16) == (s["bytes_total"], s["bytes_f16"]), text
            assert plan.bits == pytest.approx(s["bits"])
    assert cli.main(["info", str(demo_model), "-c", str(n_ctx)]) == 0
    assert f"stream of {n_ctx} tokens, for which llama.cpp makes {m.n_ctx} cells" in capsys.readouterr().out


def test_a_model_without_cache(capsys: pytest.CaptureFixture[str], write_gguf: Callable[..., Path]) -> None:
    fields = {k.replace("llama.", "bert."): v for k, v in LLAMA_FIELDS.items()}
    path = str(write_gguf("encoder.gguf", {**fields, "general.architecture": "bert"}))
    code, out, _ = run(capsys, "info", path)
    assert code == 0 and "keeps none for this architecture" in out and "kivi" not in out
    code, _, err = run(capsys, "info", path, "--cache", "kivi")
    assert code == 2 and "--cache kivi" in err
    out = run(capsys, "doctor", "-m", path)[1]
    assert "note  model: encoder.gguf (bert) keeps no KV cache" in out and "BAD   model" not in out


def test_info_takes_the_model_as_other_commands_do(capsys: pytest.CaptureFixture[str], demo_model: Path) -> None:
    want = run(capsys, "info", str(demo_model), "-c", "2048")
    assert run(capsys, "info", "-m", str(demo_model), "-c", "2048") == want and want[0] == 0
    code, out, err = run(capsys, "info")
    assert (code, out) == (2, "") and err == "ggml-kvq info: error: no FILE; give -m MODEL.gguf\n"
    code, out, err = run(capsys, "info", "a.gguf", "-m", "b.gguf")
    assert (code, out) == (2, "") and "b.gguf are both given" in err and err.count("\n") == 1


@pytest.mark.parametrize("command", ["embed", "report", "info", "calibrate", "tune", "methods", "eval", "bench"])
def test_help_says_what_a_command_does(command: str) -> None:
    parsers: Any = cli.build_parser()._subparsers
    parser = parsers._group_actions[0].choices[command]
    assert parser.description and len(parser.description) > 20
