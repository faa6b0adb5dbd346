"""The documentation builds as a site without a warning, and no link in it is dead."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import urllib.parse
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Page(HTMLParser):
    """What a page refers to, and what in it can be referred to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key == "id" and value:
                self.ids.add(value)
            if key in ("href", "src") and value:
                self.links.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "WARNING" not in done.stderr, done.stderr[-4000:]
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    found = {p: Page(p.read_text(encoding="utf-8")) for p in sorted(site.rglob("*.html"))}
    assert len(found) > 30
    return found


def test_no_link_is_dead(site: Path, pages: dict[Path, Page]) -> None:
    """Pages, anchors, pictures. What lies elsewhere has to be https: nothing is fetched here."""
    dead, inner = [], 0
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links are from the root of a server
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                if parts.scheme not in ("https", "data"):
                    dead.append(f"{path.relative_to(site)}: {link}")
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            inner += 1
            if not target.exists():
                dead.append(f"{path.relative_to(site)}: {link}")
            elif parts.fragment and target in pages and parts.fragment not in pages[target].ids | {"__skip"}:
                dead.append(f"{path.relative_to(site)}: {link} (no such place)")
    assert inner > 1000 and not dead, "\n".join(dead)


def test_decisions_are_pages_of_one_shape() -> None:
    """Question, what was measured, answer; the index names each once. What holds today is a reference, not a diary."""
    folder = ROOT / "docs/decisions"
    index = (folder / "index.md").read_text()
    pages = [p for p in sorted(folder.glob("*.md")) if p.name != "index.md"]
    assert len(pages) > 20
    for page in pages:
        text = page.read_text()
        title = text.splitlines()[0].removeprefix("# ")
        assert title.endswith("?"), f"{page.name}: {title!r} is no question"
        assert text.count("\n**Question.** ") == 1 and text.count("\n**Answer.** ") == 1, page.name
        assert index.count(f"| [{title}]({page.name}) |") == 1, f"docs/decisions/index.md does not list {page.name}"
    assert len((ROOT / "docs/performance-gpu.md").read_text().splitlines()) <= 250


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    """Scripts, styles and fonts come with the site."""
    for path in pages:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r'<(?:script|img|iframe)[^>]+src="https?:', text), path
        assert not re.search(r'<link[^>]+rel="(?:stylesheet|preconnect)"[^>]+href="https?:', text), path


def test_interfaces_are_on_their_pages(site: Path) -> None:
    python = (site / "api/python.html").read_text(encoding="utf-8")
    for name in ("generate", "perplexity", "save_state", "kv_stats"):
        assert f'id="ggml_kvq.core.model.Model.{name}"' in python, name
    c = (site / "api/c.html").read_text(encoding="utf-8")
    headers = "".join((ROOT / "ggml-kvq/include" / h).read_text() for h in load("c_api_page").HEADERS)
    names = re.findall(r"^KVQ_API [\w\s*]*?\b(\w+)\(", headers, re.MULTILINE)
    names += re.findall(r"^} (\w+);", headers, re.MULTILINE)
    assert len(names) > 50
    missing = [name for name in names if f'id="{name}"' not in c]
    assert not missing


def test_every_paper_has_a_page_that_says_why(site: Path) -> None:
    for name in ("aqua-kv", "zipcache", "xquant", "minikv", "specache"):
        text = (ROOT / "docs/papers" / f"{name}.md").read_text()
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == [
            "What it claims",
            "What we measured",
            "Why they differ",
        ]
        assert "arxiv.org/abs/" in text and "(section " in text, name


def test_links_out_of_the_documentation() -> None:
    """To a file of the repository: its name. To nothing: an error."""
    relative = load("site_hooks").relative
    assert relative("[server](../examples/server.sh)", "usage.md") == "server (`examples/server.sh`)"
    assert relative("[a](docs/states.md#x)", "security.md") == "[a](states.md#x)"
    assert relative("[log](CHANGELOG.md)", "contributing.md") == "[log](changelog.md)"
    assert relative("[p](../performance.md)", "methods/kivi.md") == "[p](../performance.md)"
    with pytest.raises(KeyError, match="there is no examples/nothing"):
        relative("[x](../examples/nothing)", "usage.md")
