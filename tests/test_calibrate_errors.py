"""Calibration that met what it should not: a folder with other files, a model that changed, a second run, models of
unusual shapes. Each of these lost files or work, gave figures of nothing, or ended in a trace.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import random_models
from conftest import LLAMA_FIELDS, run_python
from ggml_kvq import Model, cli, default_means, errors, gguf_header, info, memory, plotting
from ggml_kvq import files as disk
from ggml_kvq.calibrate import capture, files, means, tune
from ggml_kvq.errors import KvqError
from ggml_kvq.evaluate import perplexity, specs

TEXT = "The register file holds sixteen words. Each word is read by the decoder before the next cycle begins. " * 60
SMALL = ["--sequences", "2", "--length", "64", "-t", "1"]


@pytest.fixture
def folder(demo_model: Path, tmp_path: Path) -> Path:
    """A model and a text."""
    shutil.copy(demo_model, tmp_path / "m.gguf")
    (tmp_path / "t.txt").write_text(TEXT)
    return tmp_path


def calibrate(folder: Path, *more: str, command: str = "calibrate") -> int:
    files = ["-m", str(folder / "m.gguf"), "-f", str(folder / "t.txt"), "-o", str(folder / "out.gguf")]
    small = SMALL[2:] if "xquant" in more else SMALL  # a search takes windows, no sequences
    return cli.main([command, *files, *small, *more])


def test_other_files_in_the_work_folder_stay(folder: Path) -> None:
    """--work DIR was emptied before the run and removed behind it."""
    work = folder / "work"
    (work / "sub").mkdir(parents=True)
    (work / "sub" / "mine.txt").write_text("x")
    partial = folder / "out.gguf.partial"  # where rows lie without --work
    partial.mkdir()
    (partial / "mine.txt").write_text("x")
    assert calibrate(folder, "--predictor", "k", "--work", str(work)) == 0
    assert calibrate(folder, "--predictor", "k") == 0
    assert [p.name for p in work.rglob("*")] == ["sub", "mine.txt"]
    assert [p.name for p in partial.iterdir()] == ["mine.txt"]


def hybrid(path: Path) -> Path:
    """Eight layers of which every fourth has attention, as Qwen3.5 writes it: one number of heads for all."""
    writer = gguf.GGUFWriter(str(path), "qwen35")
    for key, value in LLAMA_FIELDS.items():
        if key.startswith("llama."):
            writer.add_uint32(key.replace("llama", "qwen35"), 8 if key.endswith("block_count") else value)
    for il in range(8):
        names = ("attn_k", "attn_v") if il % 4 == 3 else ("attn_qkv", "ssm_out")
        for name in names:
            writer.add_tensor(f"blk.{il}.{name}.weight", np.ones((128, 256), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_layers_without_attention_are_not_calibrated(tmp_path: Path) -> None:
    """All layers were asked for rows ("layer 0 has no cache to read"), and a preset was scaled to eight layers, which
    the model with two refuses (kq=6).
    """
    model = hybrid(tmp_path / "m.gguf")
    assert capture.layers(model) == [(3, 2, 64, 64), (7, 2, 64, 64)]
    out = tmp_path / "x.gguf"
    assert cli.main(["calibrate", "--method", "xquant", "-m", str(model), "-o", str(out)]) == 0
    assert max(value for key, value in files.read_sidecar(out)[0].items() if key[-2:] in ("kq", "vq", "km", "vm")) == 2
    f16 = plotting.memory_rows(model, [specs.parse("upstream:f16")], [1024])[0]
    assert f16["bytes_total"] == 2 * 1024 * 2 * 2 * 64 * 2


def test_presets_are_planned_for_the_layers_with_attention(tmp_path: Path) -> None:
    """xquant's preset of a hybrid model was planned for all layers: 7.10 bits where the cache that is made has 6.60."""
    model = hybrid(tmp_path / "m.gguf")
    header = gguf_header.read(model, tensors=True)
    two_of_two = [p.bits for p in info.plans(header, 512, [specs.parse("xquant:kq=0,vq=2,km=2,vm=2")])]
    assert [p.bits for p in info.plans(header, 512, [specs.parse("xquant")])] == two_of_two
    assert plotting.memory_rows(model, [specs.parse("xquant")], [512])[0]["bits"] == two_of_two[0]
    facts = memory.model(model)
    assert facts and facts.n_layer == 2


def small(demo: Path, out: Path, *, head: int = 64, tokenizer: bool = True) -> Path:
    """Two random layers with one KV head, and the demo model's tokenizer or none."""
    writer = gguf.GGUFWriter(str(out), "llama")
    sizes = {"context_length": 512, "embedding_length": 128, "block_count": 2, "feed_forward_length": 64}
    heads = {"head_count": 2, "head_count_kv": 1, "key_length": head, "value_length": head}
    for key, value in {**sizes, **{f"attention.{key}": value for key, value in heads.items()}}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.vocab_size", 8192)
    writer.add_uint32("llama.rope.dimension_count", head)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    if tokenizer:
        random_models.copy_tokenizer(writer, demo)
    else:
        writer.add_string("tokenizer.ggml.model", "none")
    shapes: random_models.Shapes = {"token_embd": (8192, 128), "output_norm": (128,)}
    layer: random_models.Shapes = {
        "attn_q": (2 * head, 128),
        "attn_k": (head, 128),
        "attn_v": (head, 128),
        "attn_output": (128, 2 * head),
    }
    layer |= {
        "ffn_gate": (64, 128),
        "ffn_up": (64, 128),
        "ffn_down": (128, 64),
        "attn_norm": (128,),
        "ffn_norm": (128,),
    }
    random_models.write(writer, shapes, layer, 2, 1 / 11)
    return out


def test_widths_that_q4_0_cannot_hold_are_refused(
    folder: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One KV head of 80 channels ended in a trace behind the whole capture; f16 takes it."""
    small(demo_model, folder / "m.gguf", head=80)
    assert calibrate(folder, "--predictor", "fold", "--weights", "q4_0") == 2
    assert "--weights f16" in capsys.readouterr().err
    assert not list(folder.glob("*.partial"))
    assert calibrate(folder, "--predictor", "fold") == 0


def test_a_text_too_short_leaves_no_folder(folder: Path) -> None:
    (folder / "t.txt").write_text("short")
    assert calibrate(folder, "--predictor", "full") == 2
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize("command", ["calibrate", "eval --tasks lines"])
def test_a_seed_below_zero_is_refused(command: str) -> None:
    with pytest.raises(SystemExit):
        cli.main([*command.split(), "-m", "m.gguf", "-f", "t.txt", "--seed", "-1"])


def test_a_model_without_a_tokenizer_is_refused(
    folder: Path, demo_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """llama.cpp ended the process (134)."""
    small(demo_model, folder / "m.gguf", tokenizer=False)
    argv = ["-m", str(folder / "m.gguf"), "-f", str(folder / "t.txt")]
    code = "import sys; from ggml_kvq.cli import main; sys.exit(main())"
    done = run_python(code, "calibrate", *argv, *SMALL, check=False)
    assert done.returncode == 2 and "has no tokenizer" in done.stderr, done.stderr[-300:]
    with Model(folder / "m.gguf", "kivi", n_ctx=256, n_threads=1) as model:
        for call in (lambda: model.detokenize([1]), lambda: model.piece(1), lambda: model.tokenize("x")):
            with pytest.raises(errors.ModelError, match="has no tokenizer"):
                call()
        assert len(model.logits([1, 2, 3])) == 3


def negate_values(path: Path) -> None:
    """Another model in the file of this one: its values have the other sign."""
    data = bytearray(path.read_bytes())
    for t in gguf.GGUFReader(path).tensors:
        if t.name.endswith("attn_v.weight"):
            codes = np.frombuffer(data, np.int8, t.n_bytes, t.data_offset).reshape(-1, 34)
            codes[:, 2:] = -codes[:, 2:]
    path.write_bytes(data)


class Stopped(Exception):
    pass


def test_the_sums_of_a_model_that_was_written_again_are_not_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of another model under the same name went on with the sums of the first one."""
    path, store, each = folder / "m.gguf", folder / "s.npz", capture.each
    calls = 0

    def stops(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Stopped
        return each(*args)

    monkeypatch.setattr(capture, "each", stops)
    with pytest.raises(Stopped):
        means.fit(path, TEXT, n_sequences=2, length=64, n_threads=1, checkpoint=store)
    assert store.is_file()
    negate_values(path)
    again = means.fit(path, TEXT, n_sequences=2, length=64, n_threads=1, checkpoint=store)
    fresh = means.fit(path, TEXT, n_sequences=2, length=64, n_threads=1)
    assert all(np.array_equal(again.mean[il][1], fresh.mean[il][1]) for il in fresh.mean)


def test_a_disk_that_is_full_at_the_end_costs_no_calibration(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums went before the sidecar was written: hours of a large model."""
    write, each = files.write_sidecar, capture.each
    calls: list[int] = []

    def counted(*args: Any) -> Any:
        calls.append(1)
        return each(*args)

    monkeypatch.setattr(capture, "each", counted)

    def full(*args: Any) -> None:
        raise KvqError("the disk is full")

    monkeypatch.setattr(files, "write_sidecar", full)
    assert calibrate(folder) == 2 and len(calls) == 2
    monkeypatch.setattr(files, "write_sidecar", write)
    assert calibrate(folder) == 0 and len(calls) == 2
    assert sorted(p.name for p in folder.iterdir()) == ["m.gguf", "out.gguf", "t.txt"]
    assert files.read_sidecar(folder / "out.gguf")[0]["kvq.aqua.tokens"] == 120


def test_tuning_does_not_compare_with_another_models_logits(folder: Path) -> None:
    """f16.base says what text it is of, not of what model."""
    text, protocol = TEXT * 2, perplexity.Protocol(256, 32, 0, 1)
    work = folder / "w"
    work.mkdir()
    (work / "f16.base").write_bytes(b"x")
    tune._Bench(folder / "m.gguf", work / "s.gguf", protocol, work, [text], 1)
    assert not (work / "f16.base").exists()


@pytest.mark.parametrize("command", ["calibrate", "calibrate --method xquant", "calibrate --predictor k", "tune"])
def test_two_runs_do_not_share_an_output(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second one emptied the folder that the first one had its rows in."""
    with disk.alone(folder / "out.gguf", "ggml-kvq calibrate"):
        assert calibrate(folder, *command.split()[1:], "--length", "384", command=command.split()[0]) == 2
    assert f"process {os.getpid()}" in capsys.readouterr().err
    assert sorted(p.name for p in folder.iterdir()) == ["m.gguf", "t.txt"]


def test_runs_with_one_work_folder_do_not_share_rows(folder: Path) -> None:
    """Outputs of one name in two folders."""
    work = folder / "work"
    with disk.alone(work / "out.gguf.rows", "ggml-kvq calibrate"):
        assert calibrate(folder, "--predictor", "k", "--work", str(work)) == 2
    assert calibrate(folder, "--predictor", "k", "--work", str(work)) == 0
    assert not list(work.iterdir())


def test_what_is_left_of_a_broken_checkpoint_is_not_read(folder: Path) -> None:
    (folder / "out.gguf.partial.npz").write_bytes(b"junk")
    assert calibrate(folder) == 0
    work = folder / "out.gguf.partial"
    work.mkdir()
    (work / "tune.json").write_text("{")
    (work / "mine.txt").write_text("x")
    assert calibrate(folder, "--sequences", "1", "--length", "256", command="tune") == 0
    assert [p.name for p in work.iterdir()] == ["mine.txt"]


def test_a_link_to_nothing_stays_a_link(folder: Path) -> None:
    """The link went, an empty file stayed where it had pointed to."""
    (folder / "out.gguf").symlink_to(folder / "real.gguf")
    assert calibrate(folder) == 0
    assert (folder / "out.gguf").is_symlink() and (folder / "real.gguf").stat().st_size > 1000


@pytest.mark.parametrize("more", ["", "--predictor k"])
def test_a_checkpoint_that_does_not_fit_is_named(more: str, folder: Path) -> None:
    code = "import sys; from ggml_kvq.cli import main; sys.exit(main())"
    files = ["-m", str(folder / "m.gguf"), "-f", str(folder / "t.txt"), "-o", str(folder / "out.gguf")]
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048)); "
    done = run_python(limit + code, "calibrate", *files, *SMALL, *more.split(), check=False)
    assert done.returncode == 2 and "out.gguf.partial" in done.stderr and "size limit" in done.stderr, done.stderr
    assert not [p for p in folder.rglob("*") if p.suffix in (".new", ".npz")]


def test_default_means_are_of_the_weights(folder: Path) -> None:
    """A fine-tune that leaves both ends of the file as they were, under the same name, got the means of the first
    model, which the library then refused at every start.
    """
    path = folder / "m.gguf"
    before = default_means.path_of(path)
    shutil.copy(path, folder / "copy.gguf")
    assert default_means.path_of(folder / "copy.gguf") == before
    negate_values(path)
    assert default_means.path_of(path) != before


def test_a_search_that_reads_no_codes_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All divergences were zero, and eta1=0, eta2=0 and no shared codes were written as the best."""
    (folder / "t.txt").write_text(TEXT * 2)
    assert calibrate(folder, "--method", "xquant", "--length", "256") == 2
    assert "would read no codes; give --length 384" in capsys.readouterr().err
    assert not (folder / "out.gguf").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--method xquant --predictor full", "--predictor full goes with --method aqua"),
        ("--method xquant --sequences 0", "--sequences 0 goes with --method aqua"),
        ("--method xquant --k-bits 3", "--k-bits 3 goes with --method aqua"),
        ("--method xquant --length 2048", "--length 2048: xquant searches on windows of 1024 tokens at most"),
        ("--preset 1.16", "--preset 1.16 goes with --method xquant"),
        ("--weights q4_0", "--weights q4_0 goes with --predictor k, full or fold"),
        ("--first-bits 2 --predictor bias", "--first-bits 2 goes with --predictor k, full or fold"),
        ("--work w", "--work w goes with --predictor k, full or fold"),
        ("--hf o/m", "--hf o/m goes with --predictor k, full or fold"),
    ],
)
def test_a_flag_that_nothing_reads_is_refused(
    argv: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was passed over, and the sidecar was another one than was asked for."""
    assert calibrate(folder, *argv.split()) == 2
    assert words in capsys.readouterr().err
    assert not (folder / "out.gguf").exists()


def test_a_preset_without_a_text_has_no_windows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["calibrate", "--method", "xquant", "-m", str(folder / "m.gguf"), "-o", str(folder / "out.gguf")]
    assert cli.main([*argv, "--length", "512"]) == 2
    assert "--length 512 goes with -f TEXT" in capsys.readouterr().err
    assert cli.main([*argv, "--preset", "1.16"]) == 0
    assert files.read_sidecar(folder / "out.gguf")[0]["kvq.xquant.vm"] == 0


def test_the_base_file_of_another_model_is_not_taken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its size and its words were right, and every divergence was that of two models: 8 nats."""
    files = ["-m", str(folder / "m.gguf"), "-f", str(folder / "t.txt"), "--base", str(folder / "b.base")]
    argv = ["eval", *files, "-c", "128", "--chunks", "1", "-t", "1"]
    assert cli.main([*argv, "-o", str(folder / "1.jsonl")]) == 0
    assert cli.main([*argv, "-o", str(folder / "2.jsonl")]) == 0
    negate_values(folder / "m.gguf")
    assert cli.main([*argv, "-o", str(folder / "3.jsonl")]) == 2
    assert "is of another model" in capsys.readouterr().err


def test_one_of_several_files_is_not_embedded_into(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What came out was a first part without its others, which llama.cpp does not load."""
    reader, path = gguf.GGUFReader(folder / "m.gguf"), folder / "m-00001-of-00002.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in LLAMA_FIELDS.items():
        if key.startswith("llama."):
            writer.add_uint32(key, value)
    writer.add_uint16("split.count", 2)
    writer.add_tensor("output_norm.weight", np.array(reader.tensors[1].data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "s.gguf").touch()
    assert cli.main(["embed", str(path), str(folder / "s.gguf"), str(folder / "out.gguf")]) == 2
    assert "llama-gguf-split --merge" in capsys.readouterr().err
