"""Text of a generation: whole characters, up to a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


def before(piece: Callable[[int], bytes], tokens: Sequence[int]) -> bytes:
    """Bytes of the last tokens before a text: four, for no character has more bytes."""
    return b"".join(piece(token) for token in tokens[-4:])


class Writer:
    """Takes the bytes of tokens and gives text that is certain: no part of a character, and nothing that may turn out
    to begin a stop string.
    """

    def __init__(self, stops: Sequence[str], before: bytes = b"") -> None:
        """before: bytes of the tokens before the text, of which a character that they begin belongs to it."""
        self._stops = stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(before)
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

    def rest(self, is_whole: bool = True) -> str:
        """What was held back, at the end of a text that no stop string ended. is_whole: the model ended it, so a
        character that it left unfinished is a replacement character; else who goes on gets it.
        """
        held, self._held = self._held + (self._decoder.decode(b"", final=True) if is_whole else ""), ""
        return held
