"""examples/tutorial.md: its commands, run as they stand on the demo model and on SmolLM2, and what they promise."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ggml_kvq import Model, named, report
from ggml_kvq.errors import KvqError
from ggml_kvq.evaluate import results
from ggml_kvq.launch import launcher

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = [
    shlex.split(line)
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / "examples/tutorial.md").read_text(), re.DOTALL)
    for line in block.splitlines()
]


SMOLLM2 = named.find("smollm2")
THERE = SMOLLM2.is_there()  # in the user's cache folder; the tests' own comes later
MODELS = {"demo": ROOT / "models/kvq-demo-q8_0.gguf", "smollm2": SMOLLM2.path()}


#: `ggml-kvq tune` with one measurement a side, and of a large model one in eight of those
FEW = """
from ggml_kvq.calibrate import tune
tune.MEASURED, tune.SHOWN = {{"": (2,), "k": (1,), "v": (1,)}}, (2.75,)
measure, last = tune._Bench.divergence, [0, 0.0]
def divergence(bench, opts):
    last[0] += 1
    last[1] = measure(bench, opts) if last[0] % {every} == 1 % {every} else last[1]
    return last[1]
tune._Bench.divergence = divergence
"""


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a prompt and a text."""
    if request.param == "smollm2" and not THERE:
        pytest.skip(f"no {MODELS['smollm2']}; run: ggml-kvq fetch smollm2")
    out = tmp_path_factory.mktemp(f"tutorial-{request.param}")
    shutil.copy(MODELS[request.param], out / "model.gguf")
    shutil.copy(ROOT / "examples/prompt.txt", out / "prompt.txt")
    (out / "text.txt").write_text("\n".join(p.read_text() for p in sorted((ROOT / "docs").glob("*.md"))[:3]))
    return out


def run(folder: Path, words: list[str]) -> str:
    """One command of the tutorial; tuning with fewer measurements, evaluation with fewer windows."""
    words = [w.replace("MODEL_STEM", "model").replace("MODEL", "model.gguf") for w in words]
    program, argv = words[0], words[1:]
    code = f"from ggml_kvq.launch.launcher import run; import sys; sys.exit(run({program!r}, sys.argv[1:]))"
    if program == "ggml-kvq":
        code = "from ggml_kvq.cli import main; sys.exit(main(sys.argv[1:]))"
        if argv[0] == "tune":
            code = FEW.format(every=1 if folder.name.startswith("tutorial-demo") else 8) + code
            argv += ["--sequences", "1", "--length", "256"]
        if argv[0] == "eval":
            argv += ["--chunks", "1"]
        code = f"import sys\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code, *argv],
        cwd=folder,
        env={**os.environ, "KVQ_CACHE_DIR": str(folder / "cache")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(words)}: {done.stderr[-2000:]}"
    return done.stdout + done.stderr


def test_the_commands_do_what_the_tutorial_says(folder: Path) -> None:
    assert [w[0] for w in COMMANDS].count("ggml-kvq") == 7 and COMMANDS[-1][0] == "llama-server" and len(COMMANDS) == 9
    assert COMMANDS[0] == ["ggml-kvq", "fetch", "smollm2"]  # tests/test_fetch.py runs it
    said = [run(folder, words) for words in COMMANDS[1:-1]]
    assert "auto:bits=2.75" in said[0]
    assert "measuring its keys and values, " in said[1] and "ggml-kvq: auto [bits=2.75]" in said[1]
    assert "channel means are taken off keys and values" in said[1]
    assert re.search(r"; 2\.75 bits count at 131072 tokens: these 4096 take \d\.\d\d with", said[1])
    rows = {r["key"]["cache"]: r for r in results.read(folder / "results.jsonl")}
    assert 0 < rows["auto:bits=2.75"]["kld_mean"] < rows["q4_0"]["kld_mean"]
    assert rows["tuned"]["bits_no_window"] <= 2.75 and 0 < rows["tuned"]["kld_mean"] < 0.3
    assert "divergence" in said[3] and (folder / "model.kvq.gguf").is_file()
    with Model(folder / "tuned.gguf", n_ctx=4096) as model:  # the file chooses for itself
        assert model.kv_method == "auto" and "calibrated data in the model's file" in model.load_line
    page = (folder / "report.html").read_text()
    assert "<svg" in page and "tuned" in page and not re.search(r'(src|href)="http', page)
    # the server itself is started by test_server_page.py
    words = ["-m", str(folder / "tuned.gguf"), *COMMANDS[-1][3:]]
    got = launcher.command("llama-server", words, {"KVQ_CACHE_DIR": str(folder / "cache")})
    assert got.env["KVQ_METHOD"] == "auto" and int(str(got.env["KVQ_OPTS"]).removeprefix("level=")) > 20
    assert got.env["KVQ_ASKED"] == "--kv-budget 64M"


def row(cache: str, bits: float, kld: float, **more: object) -> dict[str, object]:
    key = {"kind": "text", "cache": cache, "spec": cache, "model": "m", "text": "t", "n_ctx": 512, "n_ubatch": 64}
    return {"key": key, "bits": bits, "bits_no_window": bits, "kld_mean": kld, "kld_p99": 10 * kld, "ppl": 8.0,
            "same_top": 0.9, "bytes_total": 1 << 20, "method": "x", "options": "", **more}  # fmt: skip


def test_the_edge_holds_what_nothing_beats() -> None:
    rows = [row("a", 2.0, 0.1), row("b", 2.5, 0.2), row("c", 3.0, 0.01), row("d", 3.0, 0.02), row("e", 1.0, 1.0)]
    assert [r["key"]["cache"] for r in report.edge(rows)] == ["e", "a", "c"]


def test_a_report_escapes_what_it_prints_and_refuses_nothing(tmp_path: Path) -> None:
    page = report.page([row("f16", 16.0, 0.0, method="upstream"), row("<b>&", 2.0, 0.1)], title="<script>")
    assert "<script>" not in page and "&lt;b&gt;&amp;" in page and "&lt;script&gt;" in page
    with pytest.raises(KvqError, match="no row with a divergence"):
        report.page([{"key": {"kind": "retrieval"}}])
    out = tmp_path / "folder"
    out.mkdir()
    with pytest.raises(KvqError, match="folder"):
        report.write([row("f16", 16.0, 0.0, method="upstream"), row("x", 2.0, 0.1)], out)
