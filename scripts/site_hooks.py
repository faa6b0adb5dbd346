"""What mkdocs does besides: pages made from files outside docs/, and links to what is no page (mkdocs.yml, hooks)."""

from __future__ import annotations

import importlib.util
import os.path
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
#: page -> file of the root
FROM_ROOT = {"contributing.md": "CONTRIBUTING.md", "security.md": "SECURITY.md", "changelog.md": "CHANGELOG.md"}
FROM_ROOT["tutorial.md"] = "examples/tutorial.md"
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")


def c_page() -> str:
    spec = importlib.util.spec_from_file_location("c_api_page", ROOT / "scripts" / "c_api_page.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    text: str = module.page()
    return text


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made."""
    made = {"api/c.md": c_page()}
    made |= {page: (ROOT / name).read_text(encoding="utf-8") for page, name in FROM_ROOT.items()}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def relative(text: str, uri: str) -> str:
    """Links of a page at `uri` under docs/ (or of a file of the root that became it): to pages as they are, to other
    files of the repository as their names. KeyError when nothing is there.
    """
    origin = FROM_ROOT.get(uri, f"docs/{uri}")
    pages = {name: page for page, name in FROM_ROOT.items()}

    def one(m: re.Match[str]) -> str:
        label, target, anchor = m[1], m[2], m[3] or ""
        path = os.path.normpath(os.path.join(os.path.dirname(origin), target))
        if path in pages:
            page = pages[path]
        elif path.startswith("docs/"):
            page = path.removeprefix("docs/")
        elif (ROOT / path).exists():
            return f"`{path}`" if path.endswith(label) and "." in label else f"{label} (`{path}`)"
        else:
            raise KeyError(f"{origin} links to {target}: there is no {path}")
        return f"[{label}]({os.path.relpath(page, os.path.dirname(uri) or '.')}{anchor})"

    return _LINK.sub(one, text)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    return relative(markdown, page.file.src_uri)
