"""-hf owner/repo, -m hf:owner/repo/file.gguf and -m smollm2 in a launcher's command line: our hub module fetches, the
program gets a local file.

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
_DRAFT_REPO = ("-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf")
_DRAFT = ("-md", "--model-draft", "--spec-draft-model")


def resolve(program: str, args: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, str | None]]:
    """(the arguments with hub models, drafts too, replaced by the downloaded files, changes of the environment).
    LaunchError, DownloadError.
    """
    user = User(args, environ, reads_env=program != "llama-bench")
    names = (
        user.last(_REPO, "LLAMA_ARG_HF_REPO"),
        user.last(_DRAFT_REPO, "LLAMA_ARG_SPEC_DRAFT_HF_REPO"),
        user.last(_MODEL, "LLAMA_ARG_MODEL"),
        user.last(_DRAFT, "LLAMA_ARG_SPEC_DRAFT_MODEL"),
    )
    if not names[0] and not names[1] and not _remote(names[2]) and not _remote(names[3]):
        return list(args), {}
    if user.has(("--offline",)) or "LLAMA_ARG_OFFLINE" in user.environ:
        os.environ["HF_HUB_OFFLINE"] = "1"
    token = user.last(_TOKEN, "HF_TOKEN") or None
    out, gone = _draft(user, args, environ, names[1], names[3], token)
    out, more = _main(program, User(out, environ, user.reads_env), environ, names[0], names[2], token)
    _, out = without(out, _TOKEN)
    return out, {**gone, **more}


def _remote(paths: str) -> bool:
    """Is one of the models of a list downloaded? Paths of files do not load the hub's module."""
    if "hf:" not in paths and all(path.endswith(".gguf") for path in paths.split(",") if path):
        return False
    from .. import hub

    return any(hub.is_remote(path) for path in paths.split(","))


def _draft(
    user: User, args: Sequence[str], environ: Mapping[str, str], repo: str, path: str, token: str | None
) -> tuple[list[str], dict[str, str | None]]:
    """-hfd owner/repo:Q8_0 and -md hf:owner/repo/file.gguf, as _main() for the model."""
    from .. import hub

    if not repo and not hub.is_remote(path):
        return list(args), {}
    if repo and path:
        raise LaunchError(f"-hfd {repo} and -md {path} both name a draft model: drop one of them")
    name, _, tag = repo.partition(":")
    if repo and name.count("/") != 1:
        raise LaunchError(
            f"-hfd {repo} is no repository; write -hfd owner/repo, -hfd owner/repo:Q8_0, or -md hf:owner/repo/file.gguf"
        )
    draft = hub.choose(name, tag, token=token)[0] if repo else hub.remote(path, token)
    _, out = without(args, (*_DRAFT_REPO, *_DRAFT))
    gone = [k for k in ("LLAMA_ARG_SPEC_DRAFT_HF_REPO", "LLAMA_ARG_SPEC_DRAFT_MODEL") if k in environ]
    return [*out, "-md", str(draft)], dict.fromkeys(gone)


def _main(
    program: str, user: User, environ: Mapping[str, str], repo: str, paths: str, token: str | None
) -> tuple[list[str], dict[str, str | None]]:
    from .. import hub

    out = list(user.args)
    if not repo and not _remote(paths):
        return out, {}
    if not repo:
        fetched = ",".join(str(hub.remote(path, token)) if hub.is_remote(path) else path for path in paths.split(","))
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
    for names in (_REPO, _FILE):
        _, out = without(out, names)
    takes_images = program in ("llama-server", "llama-cli")
    given = any(
        long_name(a) in ("-mm", "--mmproj", "-mmu", "--mmproj-url", "--no-mmproj", "--no-mmproj-auto") for a in out
    )
    more = ["--mmproj", str(projector())] if projector and takes_images and not given else []
    names_gone = [k for k in ("LLAMA_ARG_HF_REPO", "LLAMA_ARG_HF_FILE") if k in environ]
    return [*out, "-m", str(model), *more], dict.fromkeys(names_gone)
