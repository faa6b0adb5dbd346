"""llama-server without a model of its own: which models it may load, as its flags name them. Children get their model
from the router; what they need of it must be there before.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from .flags import OURS, LaunchError, User

_MODEL = re.compile(r"^\s*(?:model|m|LLAMA_ARG_MODEL)\s*=\s*(.+?)\s*$", re.MULTILINE)
_OURS = re.compile(r"^\s*-*(kv-[\w-]+)\s*=\s*(.*?)\s*$", re.MULTILINE)
_COMPANION = ("mmproj", "draft")  # files beside a model that are none


def models(user: User) -> list[str]:
    """Files in --models-dir, one folder deep, and those that the presets of --models-preset name."""
    folder = user.last(("--models-dir",), "LLAMA_ARG_MODELS_DIR")
    preset = user.last(("--models-preset",), "LLAMA_ARG_MODELS_PRESET")
    found = _of_folder(Path(folder)) if folder and os.path.isdir(folder) else []
    if preset and os.path.isfile(preset):
        text = Path(preset).read_text(encoding="utf-8", errors="replace")
        found += [m[1].strip("\"'") for m in _MODEL.finditer(text)]
    return [path for path in dict.fromkeys(found) if os.path.isfile(path)]


def refuse_ours(user: User) -> None:
    """LaunchError for a flag of ours in a preset: llama.cpp reads presets, and would not know it."""
    preset = user.last(("--models-preset",), "LLAMA_ARG_MODELS_PRESET")
    if not preset or not os.path.isfile(preset):
        return
    for name, value in _OURS.findall(Path(preset).read_text(encoding="utf-8", errors="replace")):
        if (flag := f"--{name}") in OURS:
            raise LaunchError(
                f"{preset}: {name} = {value} is no option of llama.cpp: take it out, and write {flag} {value} behind"
                " llama-server, for all its models"
            )


def _of_folder(folder: Path) -> list[str]:
    """As llama.cpp reads it: files that are whole models, and the first part of those that are several."""
    files = sorted([*folder.glob("*.gguf"), *folder.glob("*/*.gguf")])
    return [str(path) for path in files if _is_model(path.name)]


def _is_model(name: str) -> bool:
    part = re.search(r"-(\d{5})-of-\d{5}\.gguf$", name)
    if name.endswith(".kvq.gguf") or (part and part[1] != "00001"):
        return False
    return not any(word in name for word in _COMPANION)
