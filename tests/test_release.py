"""What a release says about itself: one version everywhere, a citation with every paper, files that people expect."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
from ggml_kvq import __version__, _paths

ROOT = Path(__file__).resolve().parent.parent


def test_the_version_stands_in_one_place() -> None:
    """pyproject.toml, CMake and the library take it from _version.py; the citation repeats it."""
    assert re.fullmatch(r"\d+\.\d+\.\d+(?:(?:a|b|rc|\.dev)\d+)?", __version__)
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project and 'input = "python/ggml_kvq/_version.py"' in project
    assert "file(READ python/ggml_kvq/_version.py version_py)" in (ROOT / "CMakeLists.txt").read_text()
    library = ctypes.CDLL(str(_paths.backend()))
    library.kvq_version.restype = ctypes.c_char_p
    assert library.kvq_version().decode() == __version__, "the library was built from another version"
    cited = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited == [__version__]
    text = (ROOT / "CHANGELOG.md").read_text()
    assert f"## [{__version__}]" in text or ("## [Unreleased]" in text and __version__ in text)


def test_the_citation_has_every_paper() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    for arxiv in ("2501.19392", "2405.14256", "2510.11236", "2411.18077", "2503.16163", "2402.02750", "2411.17525"):
        assert f'"arXiv:{arxiv}"' in text, arxiv


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda p: p.name)
def test_issue_forms_ask_for_the_doctor(path: Path) -> None:
    text = path.read_text()
    assert path.name == "config.yml" or ("ggml-kvq doctor" in text and text.startswith("name: "))


@pytest.mark.parametrize("name", ["SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_files_that_are_named_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    paths = re.findall(r"`((?:scripts|tests|docs|python/ggml_kvq|ggml-kvq)/[\w./-]+)`", text)
    code = [f"ggml-kvq/{x}" for x in re.findall(r"`((?:host|store|cache)/\w+\.cpp)`", text)]
    missing = [x for x in [*links, *paths, *code] if not (ROOT / x).exists()]
    assert not missing, missing
