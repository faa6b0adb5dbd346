#!/usr/bin/env python3
"""The C interface as a page of the documentation, from ggml-kvq/include/*.h:  python scripts/c_api_page.py > page.md

A comment that stands above a declaration, and one behind it on the same line, are its description. Lines of dashes
with a title part sections. What a parser would have to know of C is little here: the headers are formatted by
clang-format, so a declaration begins in column 0 and ends with its semicolon.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADERS = ("ggml-kvq.h", "ggml-kvq-graph.h")
_SECTION = re.compile(r"^// -{8,} (.+)$")
_NAME = re.compile(r"\b((?:ggml_)?kvq_\w+|KVQ_\w+)\b")


@dataclass
class Entry:
    """A declaration: its name, the C text, the comment above it; a section has its title as name and no text."""

    name: str
    code: str
    comment: str


def declarations(text: str) -> tuple[str, list[Entry]]:
    """(comment at the head of the header, entries in their order)."""
    lines = text.splitlines()
    head: list[str] = []
    while lines and lines[0].startswith("//"):
        head.append(lines.pop(0))
    out: list[Entry] = []
    comment: list[str] = []
    inside = False
    while lines:
        line = lines.pop(0)
        section = _SECTION.match(line)
        if line.startswith("#ifdef __cplusplus"):
            inside = True
        if inside or not line.strip() or line.startswith("#"):
            inside = inside and not line.startswith("#endif")
            comment = []
        elif section:
            out.append(Entry(section[1], "", ""))
            comment = []
        elif line.startswith("//"):
            comment.append(line)
        elif line[0] not in " }":
            code = [line]
            while not re.search(r";\s*(//.*)?$", code[-1]) or "\n".join(code).count("{") > "\n".join(code).count("}"):
                code.append(lines.pop(0))
            out.append(Entry(name_of("\n".join(code)), "\n".join(code), prose(comment)))
            while lines and lines[0].startswith(" " * 20) and lines[0].lstrip().startswith("//"):
                out[-1].code += "\n" + lines.pop(0)
            comment = []
    return prose(head), out


def name_of(code: str) -> str:
    """What a declaration declares. ValueError when nothing looks like a name of ours."""
    plain = re.sub(r"//.*", "", code)
    typed = re.search(r"}\s*(\w+);\s*$", plain) or re.search(r"\b((?:ggml_)?kvq_\w+)\(", plain)
    name = typed or _NAME.search(plain)
    if not name:
        raise ValueError(f"no name in {code!r}")
    return name[1]


def prose(comment: list[str]) -> str:
    """A comment as Markdown: formulas and lists (indented or with a bullet) stay as they stand."""
    lines = [re.sub(r"^// ?", "", line) for line in comment]
    out: list[str] = []
    kept: list[str] = []
    for line in [*lines, ""]:
        if re.match(r"\s*\*\s|\s{2,}\S", line):
            kept.append(line)
            continue
        if kept:
            if all(re.match(r"\s*\*\s", x) for x in kept):
                out += ["", *(re.sub(r"^\s*\*\s", "- ", x) for x in kept), ""]
            else:
                out += ["", "```text", *kept, "```", ""]
            kept = []
        out.append(re.sub(r"([<>*_\[\]])", r"\\\1", line))
    return "\n".join(out).strip()


def page() -> str:
    """Markdown of all headers."""
    out = [
        "# C interface",
        "Made from the headers by scripts/c_api_page.py. Link libggml-kvq.so, or open it with `dlopen`.",
    ]
    for name in HEADERS:
        head, entries = declarations((ROOT / "ggml-kvq" / "include" / name).read_text(encoding="utf-8"))
        out += [f"## {name}", head]
        for e in entries:
            if not e.code:
                out.append(f"### {e.name[0].upper()}{e.name[1:]}")
            else:
                out += [f"#### `{e.name}`", *([e.comment] if e.comment else []), f"```c\n{e.code}\n```"]
    return "\n\n".join(out) + "\n"


if __name__ == "__main__":
    print(page(), end="")
