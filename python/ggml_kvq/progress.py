"""Progress of long work on stderr: a tqdm bar on a terminal, lines now and then anywhere else (logs, CI, a pipe)."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

EVERY_S = 30.0  # between lines


class Bar:
    """Called with the number of steps that were finished. Without tqdm, which is optional, a terminal gets lines too."""

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
        print(f"{self.label}: {self._done} of {self.total} ({self._said - self._start:.0f} s)", file=sys.stderr, flush=True)

    def __call__(self, n: int) -> None:
        self._done += n
        if self._bar is not None:
            self._bar.update(n)
        elif not self.quiet and time.monotonic() - self._said >= EVERY_S:
            self._line()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif not self.quiet:
            self._line()
