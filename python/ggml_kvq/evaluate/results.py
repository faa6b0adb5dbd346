"""Result files: JSON lines, one row per measurement, resumable, each row a citation.

A row holds its key (what was measured), the numbers, and where they come from: commit, command, date, machine.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from .. import files
from ..errors import KvqError

Row = dict[str, Any]


@lru_cache(maxsize=8)
def file_hash(path: str, size: int, mtime_ns: int) -> str:
    """First 16 hex digits of the SHA-256 of a file's first and last MiB and its size."""
    h = hashlib.sha256(str(size).encode())
    with open(path, "rb") as f:
        h.update(f.read(1 << 20))
        f.seek(max(0, size - (1 << 20)))
        h.update(f.read(1 << 20))
    return h.hexdigest()[:16]


def fingerprint(path: str | os.PathLike[str]) -> str:
    """file_hash of a path as it is now."""
    st = os.stat(path)
    return file_hash(os.fspath(path), st.st_size, st.st_mtime_ns)


def fingerprint_all(paths: Sequence[Path]) -> str:
    """Of several files; of one its fingerprint."""
    each = [fingerprint(path) for path in paths]
    return each[0] if len(each) == 1 else hashlib.sha256("".join(each).encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def commit() -> str:
    """Short commit of the source tree this package runs from (+ when the tree is changed), else the package version."""
    here = Path(__file__).resolve().parent
    try:
        args = ["git", "-C", str(here), "rev-parse", "--short=10", "HEAD"]
        out = subprocess.run(args, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        dirty = subprocess.run(
            ["git", "-C", str(here), "status", "--porcelain", "-uno"],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
        return out + ("+" if dirty.stdout.strip() else "")
    except (OSError, subprocess.SubprocessError):
        from importlib import metadata

        try:
            return "v" + metadata.version("ggml-kvq")
        except metadata.PackageNotFoundError:
            return "unknown"


@lru_cache(maxsize=1)
def machine() -> str:
    """CPU model and core count."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            name = next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores"


def command() -> str:
    """The command line as typed, folders in front of the program and of files left out."""
    args = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return shlex.join(Path(a).name if a.startswith("/") else a for a in args)


def provenance() -> Row:
    """commit, command, date (UTC), machine."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {"commit": commit(), "command": command(), "date": now.strftime("%Y-%m-%dT%H:%M:%SZ"), "machine": machine()}


def key_of(key: Row) -> str:
    """Canonical text of a key: rows with equal text measure the same thing."""
    return json.dumps(key, sort_keys=True, ensure_ascii=False)


class ResultFile:
    """Append-only JSONL. Rows already there are found by key, so an interrupted run continues where it stopped."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.rows: list[Row] = read(self.path) if self.path.exists() else []
        self._known = {key_of(r["key"]): r for r in self.rows if "key" in r}

    def get(self, key: Row) -> Row | None:
        return self._known.get(key_of(key))

    def add(self, key: Row, values: Row) -> Row:
        """Append one row and flush it to disk."""
        row = {"key": key, **values, **provenance()}
        files.append_line(self.path, json.dumps(row, ensure_ascii=False))
        self.rows.append(row)
        self._known[key_of(key)] = row
        return row


def read(path: str | os.PathLike[str]) -> list[Row]:
    """Rows of a JSONL file. A torn last line (a run that was killed) is cut off; any other bad line is an error."""
    rows: list[Row] = []
    if not Path(path).is_file():  # a device may have no end
        raise KvqError(f"{path} is not a file; give what ggml-kvq eval -o or bench -o wrote")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise KvqError(f"{path} is no file of results (byte {e.start} is no UTF-8); choose another name") from e
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as e:
            if number == len(lines):
                with files.whole(path) as partial:
                    partial.write_text("\n".join(lines[:-1]) + "\n" if lines[:-1] else "", encoding="utf-8")
                break
            raise KvqError(f"{path}:{number} is no JSON ({e.msg}); repair or remove that line") from e
        if not isinstance(rows[-1], dict) or not isinstance(rows[-1].get("key", {}), dict):
            raise KvqError(f"{path}:{number} is no row of results; remove that line")
    return rows


#: Figures that a row of this kind has, and that a page or a figure of it shows.
FIGURES = {
    "text": ("bits", "bits_no_window", "ppl", "kld_mean", "same_top", "bytes_total"),
    "retrieval": ("bits", "accuracy", "right", "n"),
}


def shown(rows: Iterable[Row], say: Callable[[str], object]) -> list[Row]:
    """Rows without those that lack a name or one of FIGURES, or where it is no number (a cache that broke the model):
    each of these is a line for `say`. Refused rows stay.
    """
    out = []
    for row in rows:
        key = row.get("key", {})
        wrong = [f"{x} is {key.get(x)}" for x in ("kind", "cache", "model") if key and not isinstance(key.get(x), str)]
        if not wrong and key and "refused" not in row:
            values = {x: row.get(x) for x in FIGURES.get(key["kind"], ())}
            wrong = [f"{x} is {v}" for x, v in values.items() if not isinstance(v, int | float) or not math.isfinite(v)]
        if wrong:
            say(f"a row of {key.get('cache')} is left out: {', '.join(wrong)}")
        else:
            out.append(row)
    return out


def table(headers: list[str], rows: Iterable[list[str]], *, markdown: bool = False) -> str:
    """Plain or Markdown table; first column left, others right."""
    body = [list(r) for r in rows]
    width = [max(len(str(r[i])) for r in [headers, *body]) for i in range(len(headers))]

    def line(cells: list[str]) -> str:
        parts = [
            str(c).ljust(w) if i == 0 else str(c).rjust(w) for i, (c, w) in enumerate(zip(cells, width, strict=True))
        ]
        return "| " + " | ".join(parts) + " |" if markdown else "  ".join(parts).rstrip()

    if markdown:
        rule = "|" + "|".join("-" * (w + 1) + ("-" if i == 0 else ":") for i, w in enumerate(width)) + "|"
    else:
        rule = "  ".join("-" * w for w in width)
    return "\n".join([line(headers), rule, *map(line, body)])
