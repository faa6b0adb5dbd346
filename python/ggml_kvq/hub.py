"""Models from the Hugging Face Hub: `hf:owner/repo/file.gguf`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .errors import DownloadError

PREFIX = "hf:"
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def split(spec: str) -> tuple[str, str, str]:
    """`hf:owner/repo/path/file.gguf@revision` -> (repo id, file name in the repo, revision or "main")."""
    body, _, revision = spec.removeprefix(PREFIX).partition("@")
    parts = body.split("/")
    if len(parts) < 3 or not parts[-1].endswith(".gguf") or not all(_PART.fullmatch(p) for p in parts):
        raise DownloadError(f"{spec!r} is not a hub path; write hf:owner/repo/file.gguf, optionally with @revision")
    return "/".join(parts[:2]), "/".join(parts[2:]), revision or "main"


def fetch(
    spec: str, *, cache_dir: str | os.PathLike[str] | None = None, token: str | None = None, endpoint: str | None = None
) -> Path:
    """Local path of a hub model; downloads it once, with huggingface_hub's progress bar and cache.

    cache_dir, token, endpoint: as huggingface_hub takes them (default: its own cache, the stored login, the public hub;
    HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE apply). Raises DownloadError naming repository, file and cure.
    """
    repo, filename, revision = split(spec)
    try:
        from huggingface_hub import errors as hub_errors
        from huggingface_hub import hf_hub_download
    except ImportError as e:
        raise DownloadError(f"{spec} needs huggingface_hub; pip install huggingface_hub") from e
    try:
        cache = None if cache_dir is None else Path(cache_dir)
        return Path(hf_hub_download(repo, filename, revision=revision, cache_dir=cache, token=token, endpoint=endpoint))
    except hub_errors.GatedRepoError as e:
        raise DownloadError(f"{repo} is gated; accept its terms on the hub and log in with `hf auth login`") from e
    except hub_errors.RepositoryNotFoundError as e:
        raise DownloadError(f"no repository {repo} on the hub; check the name, or log in if it is private") from e
    except hub_errors.RevisionNotFoundError as e:
        raise DownloadError(f"{repo} has no revision {revision}; check the part after @") from e
    except hub_errors.LocalEntryNotFoundError as e:
        raise DownloadError(f"{spec} is not in the local cache and the hub cannot be reached; check the network") from e
    except hub_errors.EntryNotFoundError as e:
        raise DownloadError(f"{repo} has no file {filename} at {revision}; see https://huggingface.co/{repo}/tree/{revision}") from e
    except (OSError, hub_errors.HfHubHTTPError) as e:
        first = (str(e).splitlines() or ["no message"])[0]
        raise DownloadError(f"{spec} could not be downloaded: {first}; check network, disk space and HF_ENDPOINT") from e


def resolve(path: str | os.PathLike[str]) -> Path:
    """A local path as it is, an `hf:` path as the downloaded file."""
    text = os.fspath(path)
    return fetch(text) if text.startswith(PREFIX) else Path(text).expanduser()
