"""Numbers of tokens on our command lines: 32768 or 32k."""

from __future__ import annotations

import argparse

from ..memory import tokens as _tokens


def tokens(text: str) -> int:
    """argparse type: "32k" is 32768, "1.5M" is 1572864."""
    try:
        return _tokens(text)
    except (ValueError, IndexError):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens; write 32768 or 32k") from None
