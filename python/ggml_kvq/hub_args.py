"""-hf owner/repo and -m hf:owner/repo/file.gguf in a launcher's command line: our hub module fetches, the program
gets a local file.

The download of the built programs is not compiled in (it needs OpenSSL).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from .flags import LaunchError, User, long_name, without

_REPO = ("-hf", "-hfr", "--hf-repo")
_FILE = ("-hff", "--hf-file")
_TOKEN = ("-hft", "--hf-token")
_MODEL = ("-m", "--model")


def resolve(program: str, args: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str | None]]:
    """(the arguments with hub models replaced by the downloaded files, changes of the environment). LaunchError,
    DownloadError.
    """
    user = User(args, environ, reads_env=program != "llama-bench")
    out = list(args)
    repo = user.last(_REPO, "LLAMA_ARG_HF_REPO")
    paths = user.last(_MODEL, "LLAMA_ARG_MODEL")
    if not repo and "hf:" not in paths:
        return out, {}
    from . import hub

    token = user.last(_TOKEN, "HF_TOKEN") or None
    offline = user.has(("--offline",)) or "LLAMA_ARG_OFFLINE" in user.environ
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    if not repo:
        fetched = ",".join(
            str(hub.fetch(path, token=token)) if path.startswith(hub.PREFIX) else path for path in paths.split(",")
        )
        _, out = without(out, _MODEL)
        return [*out, "-m", fetched], {}
    if user.values(_MODEL):
        raise LaunchError(f"-hf {repo} and -m {paths} both name a model: drop one of them")
    name, _, tag = repo.partition(":")
    if name.count("/") != 1:
        raise LaunchError(
            f"-hf {repo} is no repository; write -hf owner/repo, -hf owner/repo:Q8_0, or -m hf:owner/repo/file.gguf"
        )
    model, projector = hub.choose(name, tag, user.last(_FILE, "LLAMA_ARG_HF_FILE"), token=token)
    for names in (_REPO, _FILE, _TOKEN):
        _, out = without(out, names)
    takes_images = program in ("llama-server", "llama-cli")
    given = any(
        long_name(a) in ("-mm", "--mmproj", "-mmu", "--mmproj-url", "--no-mmproj", "--no-mmproj-auto") for a in out
    )
    more = ["--mmproj", str(projector())] if projector and takes_images and not given else []
    names_gone = [k for k in ("LLAMA_ARG_HF_REPO", "LLAMA_ARG_HF_FILE") if k in environ]
    return [*out, "-m", str(model), *more], dict.fromkeys(names_gone)
