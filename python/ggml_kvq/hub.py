"""Models from the Hugging Face Hub: `hf:owner/repo/file.gguf`; and models by name (named.py)."""

from __future__ import annotations

import os
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

from . import named
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
        return Path(
            hf_hub_download(
                repo,
                filename,
                revision=revision,
                cache_dir=None if cache_dir is None else Path(cache_dir),
                token=token,
                endpoint=endpoint,
                local_files_only=_is_silent(endpoint),
            )
        )
    except hub_errors.GatedRepoError as e:
        raise DownloadError(f"{repo} is gated; accept its terms on the hub and log in with `hf auth login`") from e
    except hub_errors.RepositoryNotFoundError as e:
        raise DownloadError(f"no repository {repo} on the hub; check the name, or log in if it is private") from e
    except hub_errors.RevisionNotFoundError as e:
        raise DownloadError(f"{repo} has no revision {revision}; check the part after @") from e
    except hub_errors.LocalEntryNotFoundError as e:
        raise DownloadError(f"{spec} is not in the local cache and the hub cannot be reached; check the network") from e
    except hub_errors.EntryNotFoundError as e:
        raise DownloadError(
            f"{repo} has no file {filename} at {revision}; see https://huggingface.co/{repo}/tree/{revision}"
        ) from e
    except (OSError, hub_errors.HfHubHTTPError) as e:
        first = (str(e).splitlines() or ["no message"])[0]
        raise DownloadError(
            f"{spec} could not be downloaded: {first}; check network, disk space and HF_ENDPOINT"
        ) from e


def _is_silent(endpoint: str | None = None) -> bool:
    """Does nobody answer at the hub? huggingface_hub asks six times and waits 23 seconds in all, for files that it
    keeps as well.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return True
    if urllib.request.getproxies():
        return False  # the proxy knows the way
    url = urllib.parse.urlsplit(endpoint or constants.ENDPOINT)
    try:
        socket.create_connection((url.hostname or "", url.port or (80 if url.scheme == "http" else 443)), 10).close()
    except OSError:
        return True
    return False


def resolve(path: str | os.PathLike[str]) -> Path:
    """A local path as it is, an `hf:` path or a model's name as the downloaded file."""
    text = os.fspath(path)
    if is_remote(text):
        return remote(text)
    file = Path(text).expanduser()
    if (name := named.near(text)) and not file.exists():
        raise DownloadError(f"{text} is no file: write {name} for the model of that name, or the path of a GGUF model")
    return file


def is_remote(text: str) -> bool:
    """Does `text` name a model that is downloaded: `hf:...`, or one by name?"""
    return text.startswith(PREFIX) or named.is_name(text)


def remote(text: str, token: str | None = None) -> Path:
    """The downloaded file of what is_remote(). DownloadError."""
    return fetch(text, token=token) if text.startswith(PREFIX) else named.resolve(text)


def _files(repo: str, token: str | None) -> list[str]:
    """Names of the GGUF files of a repository; offline, of those in the local cache."""
    try:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub import errors as hub_errors
    except ImportError as e:
        raise DownloadError(f"{repo} needs huggingface_hub; pip install huggingface_hub") from e
    try:
        if _is_silent():
            raise ConnectionError
        names = HfApi(token=token).list_repo_files(repo)
    except hub_errors.GatedRepoError as e:
        raise DownloadError(f"{repo} is gated; accept its terms on the hub and log in with `hf auth login`") from e
    except hub_errors.RepositoryNotFoundError as e:
        raise DownloadError(f"no repository {repo} on the hub; check the name, or log in if it is private") from e
    except Exception as e:  # the network layer has many errors of its own
        try:
            folder = Path(snapshot_download(repo, local_files_only=True))
        except (OSError, ValueError, hub_errors.LocalEntryNotFoundError):
            raise DownloadError(
                f"{repo} is not in the local cache and the hub cannot be reached; check the network"
            ) from e
        names = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
    return sorted(name for name in names if name.endswith(".gguf"))


def choose(
    repo: str, tag: str = "", file: str = "", *, token: str | None = None
) -> tuple[Path, Callable[[], Path] | None]:
    """(downloaded model of a repository, a function that downloads its projector, None without one).

    file: that file. tag: the file with this quantisation in its name, as "Q8_0". Neither: Q4_K_M, else Q8_0, else the
    first. All parts of a split model are fetched. Raises DownloadError.
    """
    names = _files(repo, token)
    models = [n for n in names if "mmproj" not in n.lower() and not n.lower().endswith(".kvq.gguf")]
    first = [n for n in models if not re.search(r"-\d{5}-of-\d{5}\.gguf$", n) or "-00001-of-" in n]
    wanted = [n for n in first if n == file] if file else [n for n in first if tag.lower() in n.lower()]
    if not wanted:
        what = f"no file {file}" if file else f"no GGUF file of {tag}" if tag else "no GGUF file"
        there = ", ".join(first[:6]) + (", ..." if len(first) > 6 else "")
        raise DownloadError(
            f"{repo} has {what}" + (f"; it has {there}" if first else "; convert the model with convert_hf_to_gguf.py")
        )
    if not file and not tag:
        wanted = next((c for q in ("Q4_K_M", "Q8_0") if (c := [n for n in first if q.lower() in n.lower()])), wanted)
    chosen = wanted[0]
    parts = (
        [n for n in models if re.sub(r"-\d{5}-of-", "-of-", n) == re.sub(r"-\d{5}-of-", "-of-", chosen)]
        if "-00001-of-" in chosen
        else [chosen]
    )
    paths = [fetch(f"{PREFIX}{repo}/{name}", token=token) for name in parts]
    projectors = [n for n in names if "mmproj" in n.lower()]
    if not projectors:
        return paths[0], None
    return paths[0], lambda: fetch(f"{PREFIX}{repo}/{projectors[0]}", token=token)
