"""Numbers on our command lines: tokens (32768 or 32k), and how often or how many of something."""

from __future__ import annotations

import argparse

from ..memory import tokens as _tokens


def tokens(text: str) -> int:
    """argparse type: "32k" is 32768, "1.5M" is 1572864."""
    try:
        return _tokens(text)
    except (ValueError, IndexError):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens; write 32768 or 32k") from None


def token_list(text: str) -> list[int]:
    """argparse type: "2k,8k" is [2048, 8192]."""
    return [tokens(part) for part in text.split(",")]


def natural(text: str) -> int:
    """argparse type: 0 or more."""
    return 0 if text == "0" else positive(text)


def positive(text: str) -> int:
    """argparse type: 1 or more."""
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def coords(text: str) -> int:
    """Even, up to 64; auto: -1 (calibrate/basis.py)."""
    if text == "auto":
        return -1
    found = natural(text)
    if found % 2 or found > 64:
        raise argparse.ArgumentTypeError(f"{text} is not an even number up to 64, or auto")
    return found
