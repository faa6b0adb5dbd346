"""Text of a generation: whole characters, up to a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class Writer:
    """Takes the bytes of tokens and gives text that is certain: no part of a character, and nothing that may turn out
    to begin a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def add(self, piece: bytes) -> tuple[str, bool]:
        """Text that is certain now; True: a stop string has come, and the text ends before it."""
        held = self._held + self._decoder.decode(piece)
        cut = min((i for i in (held.find(s) for s in self._stops) if i >= 0), default=-1)
        if cut >= 0:
            self._held = ""
            return held[:cut], True
        keep = max((k for s in self._stops for k in range(1, len(s)) if held.endswith(s[:k])), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def rest(self) -> str:
        """What was held back, at the end of a text that no stop string ended."""
        held, self._held = self._held + self._decoder.decode(b"", final=True), ""
        return held
