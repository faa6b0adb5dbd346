"""The folder that llama-server serves: our page, and what the library writes about its caches beside it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .. import _paths
from .flags import User

STATS = "kv-stats.json"
_PREFIX = "ggml-kvq-page-"


def wanted(program: str, user: User) -> Path | None:
    """Our page's folder, where upstream's page was not built in and the user neither serves files of his own nor
    switched pages off.
    """
    if program != "llama-server" or user.has(
        ("--path", "--no-webui", "--no-ui", "-h", "--help", "--usage", "--version", "--list-devices")
    ):
        return None
    if any(user.environ.get(f"LLAMA_ARG_{name}", "1") in ("0", "off", "false", "disabled") for name in ("UI", "WEBUI")):
        return None
    if any(f"LLAMA_ARG_{name}" in user.environ for name in ("STATIC_PATH", "NO_UI", "NO_WEBUI")):
        return None
    return _paths.page_dir()


def prepare(page: Path, environ: Mapping[str, str]) -> tuple[Path, str]:
    """(folder to serve, file in it that the library writes), of this process: the launcher becomes the server.

    Copies, no links: the server follows none out of its folder. Folders of servers that have ended are removed here.
    """
    parent = Path(environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    parent = parent if os.access(parent, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    for old in parent.glob(f"{_PREFIX}{os.getuid()}-*"):
        pid = old.name.rsplit("-", 1)[1]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}") and old.stat().st_uid == os.getuid():
            shutil.rmtree(old, ignore_errors=True)
    folder = parent / f"{_PREFIX}{os.getuid()}-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    shutil.copyfile(page / "index.html", folder / "index.html")
    return folder, str(folder / STATS)
