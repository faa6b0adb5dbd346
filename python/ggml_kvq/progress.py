"""Progress of long work on stderr: a tqdm bar on a terminal, lines now and then anywhere else (logs, CI, a pipe)."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

EVERY_S = 30.0  # between lines, at most
SOON_S = 5.0  # between the first of them


def gap(start: float) -> float:
    """Seconds between two lines of what began at `start`: a minute's work says something every five seconds."""
    return min(EVERY_S, max(SOON_S, 0.1 * (time.monotonic() - start)))


def span(seconds: float) -> str:
    """ "90 s", "12 min", "3.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Bar:
    """Called with the number of steps that were finished. Without tqdm, which is optional, a terminal gets lines
    too.
    """

    def __init__(self, label: str, total: int, quiet: bool = False) -> None:
        self.label, self.total, self.quiet = label, total, quiet
        self._done, self._start = 0, time.monotonic()
        self._said = self._start
        self._bar: Any = None
        if not quiet and sys.stderr.isatty():
            try:
                from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]
            except ImportError:
                return
            self._bar = tqdm(total=total, desc=label, leave=False, dynamic_ncols=True)

    def _line(self) -> None:
        self._said = time.monotonic()
        took = self._said - self._start
        left = f", about {span(took * (self.total / self._done - 1))} left" if 0 < self._done < self.total else ""
        print(f"{self.label}: {self._done} of {self.total} ({took:.0f} s{left})", file=sys.stderr, flush=True)

    def __call__(self, n: int) -> None:
        self._done += n
        if self._bar is not None:
            self._bar.update(n)
        elif not self.quiet and time.monotonic() - self._said >= gap(self._start):
            self._line()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif not self.quiet:
            self._line()


class Line:
    """One line of state on stderr: rewritten on a terminal, else printed now and then."""

    def __init__(self, show: bool = True) -> None:
        self.show, self._said, self._width, self._start = show, -EVERY_S, 0, time.monotonic()
        self._terminal = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        if not self.show:
            return
        if self._terminal:
            print("\r" + text.ljust(self._width), end="", file=sys.stderr, flush=True)
            self._width = len(text)
        elif time.monotonic() - self._said >= gap(self._start):
            print(text, file=sys.stderr, flush=True)
            self._said = time.monotonic()

    def clear(self) -> None:
        """Leave an empty line, or the last text where lines stay."""
        if self.show and self._terminal and self._width:
            print("\r" + " " * self._width + "\r", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Keep what is there and go to the next line."""
        if self.show and self._terminal and self._width:
            print(file=sys.stderr)
