"""Draws docs/architecture.svg from the code of ggml-kvq/: no library, same bytes every time.

    python scripts/draw_architecture.py            writes docs/architecture.svg
    python scripts/draw_architecture.py --print    prints the includes between folders

A box is a folder, its words are the title of the folder's README.md. A folder lies above every folder that it includes.
An arrow is drawn where no chain of other arrows says the same; its number counts the #include lines. The lines in a box
that begin with "also" count the others. Policies and methods are the rows of policies.inc and methods.inc.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections import Counter
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "ggml-kvq"
PICTURE = ROOT / "docs" / "architecture.svg"
SUFFIXES = (".h", ".cpp", ".cu", ".cuh")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+(["<])([^">]+)[">]', re.MULTILINE)
#: Headers of ggml and llama.cpp by their file names; ours are ggml-kvq*.h.
UPSTREAM = re.compile(r"^(?:ggml(?!-kvq)|gguf|llama)[\w/.-]*$")
LLAMA = "llama.cpp"

COLUMNS = 5
WIDTH, GAP_X, GAP_Y, MARGIN = 190, 16, 52, 18
LINE, TITLE, PAD = 15, 20, 9


def folders() -> list[str]:
    """Folders of ggml-kvq/ that hold code, by name; what lies in folders of theirs counts as theirs."""
    return sorted(p.name for p in SOURCES.iterdir() if p.is_dir() and any(f.suffix in SUFFIXES for f in p.rglob("*")))


def target(source: Path, name: str, quoted: bool) -> str | None:
    """The folder that an #include in `source` names; "llama.cpp" for upstream's headers, None for any other."""
    if quoted and (source.parent / name).is_file():
        return source.relative_to(SOURCES).parts[0]
    if (SOURCES / name).is_file():
        return name.split("/")[0] if "/" in name else None
    if (SOURCES / "include" / name).is_file():
        return "include"
    return LLAMA if UPSTREAM.match(name) else None


def includes() -> list[tuple[Path, int, str, str]]:
    """(file, line, its folder, folder included) of every #include between two folders, in the order of files."""
    out = []
    for folder in folders():
        for path in sorted((SOURCES / folder).rglob("*")):
            if path.suffix not in SUFFIXES:
                continue
            text = path.read_text()
            for m in INCLUDE.finditer(text):
                to = target(path, m[2], m[1] == '"')
                if to and to != folder:
                    out.append((path, text.count("\n", 0, m.start()) + 1, folder, to))
    return out


def rows(table: str, macro: str) -> list[str]:
    """Names in a table of one row each."""
    return re.findall(rf"^{macro}\((\w+)\)", (SOURCES / table).read_text(), re.MULTILINE)


def levels(edges: Counter[tuple[str, str]]) -> dict[str, int]:
    """Each folder one level above the highest that it includes. Raises ValueError for a circle."""
    level: dict[str, int] = {}

    def of(name: str, path: tuple[str, ...]) -> int:
        if name in path:
            raise ValueError("folders include each other: " + " -> ".join((*path[path.index(name) :], name)))
        if name not in level:
            below = sorted(b for a, b in edges if a == name)
            level[name] = 1 + max((of(b, (*path, name)) for b in below), default=-1)
        return level[name]

    for name in folders():
        of(name, ())
    return level


def direct(edges: Counter[tuple[str, str]]) -> list[tuple[str, str]]:
    """Edges that no longer way replaces."""
    below: dict[str, set[str]] = {}

    def reach(name: str) -> set[str]:
        if name not in below:
            next_ones = {b for a, b in edges if a == name}
            below[name] = next_ones.union(*(reach(b) for b in next_ones)) if next_ones else set()
        return below[name]

    return sorted(
        (a, b) for a, b in edges if not any((a, c) in edges and c != b and b in reach(c) for c in {y for _, y in edges})
    )


def purpose(folder: str) -> str:
    """What the title of the folder's README.md says of it."""
    title = (SOURCES / folder / "README.md").read_text().split("\n", 1)[0]
    return title.partition(": ")[2]


def wrap(text: str, width: int = 33) -> list[str]:
    """Lines of at most `width` characters."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return lines


def place(level: dict[str, int], arrows: list[tuple[str, str]]) -> dict[str, int]:
    """A column for every box: few arrows through boxes, few crossings, short ones. Rows take turns until none gains."""
    by_row = [[n for n in sorted(level) if level[n] == y] for y in range(max(level.values()) + 1)]

    def cost(x: dict[str, int]) -> float:
        total = 0.0
        for a, b in arrows:
            run, rise = x[b] - x[a], level[a] - level[b]
            total += run * run / rise
            for n in x:
                if level[b] < level[n] < level[a]:
                    off = abs(x[a] + run * (level[a] - level[n]) / rise - x[n])
                    total += 80 if off < 0.75 else 0
        for (a, b), (c, d) in itertools.combinations(arrows, 2):
            top, bottom = min(level[a], level[c]), max(level[b], level[d])
            if top > bottom and len({a, b, c, d}) == 4:

                def at(p: str, q: str, y: int) -> float:
                    return x[p] + (x[q] - x[p]) * (level[p] - y) / (level[p] - level[q])

                total += 8 * ((at(a, b, top) - at(c, d, top)) * (at(a, b, bottom) - at(c, d, bottom)) < 0)
        return total + 0.3 * sum(abs(c - (COLUMNS - 1) / 2) for c in x.values())

    best: dict[str, int] = {}
    for start in itertools.product(range(COLUMNS), repeat=2):  # rows begin in turn at these columns
        x = {n: (i + start[y % 2]) % COLUMNS for y, row in enumerate(by_row) for i, n in enumerate(row)}
        while True:
            before = cost(x)
            for row in by_row:
                choices = [x | dict(zip(row, c)) for c in itertools.permutations(range(COLUMNS), len(row))]
                x = min(choices, key=cost)
            if cost(x) >= before:
                break
        if not best or cost(x) < cost(best):
            best = x
    return best


def box_lines(folder: str, edges: Counter[tuple[str, str]], arrows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """(class, text) of the lines below a box's title."""
    lines = [("what", t) for t in wrap(purpose(folder))]
    if folder == "policy":
        lines += [("list", t) for t in wrap(" ".join(rows("policy/policies.inc", "KVQ_POLICY")))]
    if folder == "methods":
        lines += [("list", t) for t in wrap(" ".join(rows("methods.inc", "KVQ_METHOD")))]
    others = [
        f"{b}\N{NO-BREAK SPACE}{n}" for (a, b), n in sorted(edges.items()) if a == folder and (a, b) not in arrows
    ]
    return lines + [("also", t) for t in (wrap("also " + ", ".join(others)) if others else [])]


def draw() -> str:
    """The picture."""
    found = Counter((a, b) for _, _, a, b in includes())
    upstream = Counter({a: n for (a, b), n in found.items() if b == LLAMA})
    edges = Counter({e: n for e, n in found.items() if e[1] != LLAMA})
    level, arrows = levels(edges), direct(edges)
    column = place(level, arrows)
    text = {n: box_lines(n, edges, arrows) for n in level}
    for n, count in sorted(upstream.items()):
        text[n] += [("ggml", t) for t in wrap(f"headers of ggml and llama.cpp: {count}")]
    height = {n: TITLE + LINE * len(text[n]) + PAD for n in level}
    top: dict[int, int] = {}
    y = MARGIN
    for row in range(max(level.values()), -1, -1):
        top[row] = y
        y += max(height[n] for n in level if level[n] == row) + GAP_Y
    left = {n: MARGIN + column[n] * (WIDTH + GAP_X) for n in level}
    total_w, total_h = MARGIN * 2 + COLUMNS * WIDTH + (COLUMNS - 1) * GAP_X, y - GAP_Y + MARGIN

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_w} {total_h}" width="{total_w}"'
        f' height="{total_h}" font-family="DejaVu Sans, Verdana, sans-serif" font-size="11">',
        "<!-- drawn by scripts/draw_architecture.py from the #include lines of ggml-kvq/ -->",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#666"/></marker></defs>',
        f'<rect width="{total_w}" height="{total_h}" fill="#fff"/>',
    ]
    ends: dict[tuple[str, str], tuple[float, int, float, int]] = {}
    for a, b in arrows:
        starts = sorted((p for p in arrows if p[0] == a), key=lambda p: (left[p[1]], p[1]))
        stops = sorted((p for p in arrows if p[1] == b), key=lambda p: (left[p[0]], p[0]))
        x0 = left[a] + WIDTH * (starts.index((a, b)) + 1) / (len(starts) + 1)
        x1 = left[b] + WIDTH * (stops.index((a, b)) + 1) / (len(stops) + 1)
        ends[a, b] = (x0, top[level[a]] + height[a], x1, top[level[b]])
    for x0, y0, x1, y1 in ends.values():
        out.append(
            f'<line x1="{x0:.1f}" y1="{y0}" x2="{x1:.1f}" y2="{y1 - 1}" stroke="#666" stroke-width="1.3"'
            ' marker-end="url(#head)"/>'
        )
    for n in sorted(level):
        x, y0 = left[n], top[level[n]]
        out.append(
            f'<rect x="{x}" y="{y0}" width="{WIDTH}" height="{height[n]}" rx="6" fill="#eef4fb" stroke="#4a78a8"/>'
        )
        out.append(f'<text x="{x + PAD}" y="{y0 + 17}" font-size="13" font-weight="bold">{n}/</text>')
        style = {"what": "#222", "list": "#a04000", "also": "#777", "ggml": "#777"}
        for i, (kind, line) in enumerate(text[n]):
            out.append(
                f'<text x="{x + PAD}" y="{y0 + 17 + LINE * (i + 1)}" fill="{style[kind]}"'
                f' font-size="10">{escape(line)}</text>'
            )
    for (a, b), (x0, y0, x1, y1) in ends.items():
        middle, y = x0 + (x1 - x0) * 18 / (y1 - y0), y0 + 18  # near the includer, where arrows lie apart
        w = 8 + 7 * len(str(edges[a, b]))
        out.append(
            f'<rect x="{middle - w / 2:.1f}" y="{y - 8}" width="{w}" height="15" rx="7" fill="#fff" stroke="#bbb"/>'
        )
        out.append(f'<text x="{middle:.1f}" y="{y + 4}" text-anchor="middle" font-size="10">{edges[a, b]}</text>')
    return "\n".join([*out, "</svg>", ""])


def main() -> int:
    if sys.argv[1:] == ["--print"]:
        for (a, b), n in sorted(Counter((a, b) for _, _, a, b in includes()).items()):
            print(f"{a:8} -> {b:10} {n}")
        return 0
    if sys.argv[1:]:
        print(__doc__, file=sys.stderr)
        return 2
    PICTURE.write_text(draw())
    print(PICTURE.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
