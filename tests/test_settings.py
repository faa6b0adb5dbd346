"""Every environment variable that the library reads stands in base/settings.inc and in docs/llama-cpp.md."""

from __future__ import annotations

import re

from conftest import ROOT

SOURCES = ROOT / "ggml-kvq"
ROWS = re.findall(
    r'^KVQ_SETTING\((\w+), "(\w+)", "([^"]+)"\)', (SOURCES / "base/settings.inc").read_text(), re.MULTILINE
)


def test_each_is_documented_and_used() -> None:
    text = (ROOT / "docs" / "llama-cpp.md").read_text()
    code = "".join(p.read_text() for p in SOURCES.rglob("*") if p.suffix in (".cpp", ".h", ".cu", ".cuh"))
    assert len(ROWS) > 10
    for row, name, what in ROWS:
        assert f"`{name}`" in text, f"docs/llama-cpp.md does not tell {name}: {what}"
        assert f"kvq_setting::{row}" in code, f"nobody reads {name}"


def test_nobody_else_reads_the_environment() -> None:
    files = [p for p in SOURCES.rglob("*") if p.suffix in (".cpp", ".h", ".cu", ".cuh") and "getenv" in p.read_text()]
    assert [p.name for p in files] == ["settings.h"]
