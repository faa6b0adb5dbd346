"""docs/own-model.md: its commands on the demo model, with less text and fewer tasks, and what they leave behind."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ggml_kvq.evaluate import results

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / "docs/own-model.md").read_text(), re.DOTALL)
    for line in block.splitlines()
]
#: what makes them short
FEW = {"calibrate": ["--sequences", "2", "--length", "512"]}
LESS = {"--chunks": "1", "--samples": "1", "--lengths": "300", "-d": "0,64"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("own-model")
    shutil.copy(ROOT / "models/kvq-demo-q8_0.gguf", out / "model.gguf")
    pages = [p.read_text() for p in sorted((ROOT / "docs").glob("*.md"))]
    (out / "calibration.txt").write_text("\n".join(pages[:3]))
    (out / "text.txt").write_text("\n".join(pages[3:6]))
    return out


def test_the_page_has_four_commands_and_the_one_that_ships() -> None:
    assert [w[:2] for w in COMMANDS] == [["ggml-kvq", x] for x in ("info", "calibrate", "eval", "bench", "embed")]


def test_its_commands_run_one_behind_the_other(folder: Path) -> None:
    for words in COMMANDS:
        less = LESS | ({"-c": "512"} if words[1] == "eval" else {})
        argv = [less.get(before, word) for before, word in zip(["", *words[1:]], words[1:], strict=False)]
        argv += FEW.get(words[1], [])
        done = subprocess.run(
            [sys.executable, "-c", "import sys; from ggml_kvq.cli import main; sys.exit(main(sys.argv[1:]))", *argv],
            cwd=folder,
            env={**os.environ, "KVQ_CACHE_DIR": str(folder / "cache")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{shlex.join(words)}: {done.stderr[-2000:]}"
    asked = [words[i + 1] for words in COMMANDS[2:3] for i, word in enumerate(words) if word == "--cache"]
    rows = [r["key"] for r in results.read(folder / "results.jsonl")]
    assert {r["spec"] for r in rows if r["kind"] == "text"} >= set(asked), rows
    assert "aqua" in (folder / "model-aqua.card.md").read_text()
