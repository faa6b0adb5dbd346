"""Files that are whole or absent: written under another name, flushed to the disk, then renamed. And lines appended
whole or not at all.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import KvqError

MIB = 1 << 20
_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file size limit is reached",
}


def _words(n_bytes: int) -> str:
    return f"{n_bytes / MIB:.1f} MiB" if n_bytes >= MIB // 10 else f"{n_bytes} bytes"


def refuse(path: Path, e: OSError, need: int = 0) -> KvqError:
    """One line for a file that could not be written: what, why, how many bytes it needs (0: unknown) and how many
    are free.
    """
    if e.errno not in _FULL:
        return KvqError(f"{path} could not be written: {e.strerror or e}; check the path and its permissions")
    try:
        free = f", {_words(shutil.disk_usage(path.parent).free)} are free"
    except OSError:
        free = ""
    size = f": it needs {_words(need)}{free}" if need else free.replace(", ", ": ", 1)
    return KvqError(f"{path} could not be written, {_FULL[e.errno]}{size}; make room or choose another folder")


def target_of(path: str | os.PathLike[str]) -> Path:
    """Where a file named `path` is written: what a symbolic link names. OSError when something lies there that is no
    file. A rename would put the file in the place of a device (/dev/null, for a user who may do that) or a pipe.
    """
    target = Path(path)
    if not target.name or "\0" in os.fspath(target):
        raise OSError(errno.EINVAL, f"{os.fspath(path)!r} names no file")
    if target.is_symlink():
        target = Path(os.path.realpath(target))
    if target.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is a device or a pipe, which a file would replace")
    return target


def keep_inputs(output: str | os.PathLike[str], words: str, *inputs: str | os.PathLike[str] | None) -> None:
    """KvqError when `output`, which `words` names, is one of the files that are read (None: no file): writing it would
    destroy that.
    """
    for path in inputs:
        if path and os.path.exists(output) and os.path.exists(path) and os.path.samefile(path, output):
            raise KvqError(f"{words} {os.fspath(output)} is a file that is read; choose another name")


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _hold(path: Path, how: int = 0) -> int:
    """Handle of the file at `path`, made if need be, that nobody else holds until it is closed. how: LOCK_NB raises
    BlockingIOError where another one holds it; else wait for that.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | how)
        except BlockingIOError:
            os.close(handle)
            raise
        except OSError:
            return handle  # a file system without locks
        if _is_at(handle, path):
            return handle
        os.close(handle)  # whoever held it has just removed or renamed it


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's
    return True


def _remove_leftovers(target: Path) -> None:
    """Files of unfinished() for `target` whose process was killed. Its number alone proves nothing where machines or
    containers share a folder: there the lock tells.
    """
    name = re.compile(rf"\.{re.escape(target.stem)}\.([1-9]\d{{0,6}})\.part{re.escape(target.suffix)}")
    left: list[Path] = []
    with suppress(OSError):  # a folder that may not be listed
        left = [p for p in target.parent.iterdir() if (m := name.fullmatch(p.name)) and not _lives(int(m[1]))]
    for path in left:
        with suppress(OSError):  # another process was first, or there are no locks here, or it is another user's
            if path.is_symlink() or not path.is_file():
                continue
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(handle)


@contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """An empty file beside `target`, of its suffix (writers choose formats by it), that goes with the block unless it
    was renamed. What killed processes left of theirs goes before. OSError.
    """
    _remove_leftovers(target)
    partial = target.with_name(f".{target.stem}.{os.getpid()}.part{target.suffix}")
    handle = _hold(partial)
    try:
        yield partial
    finally:
        if _is_at(handle, partial):  # it was not renamed: what lies there now may be another thread's
            partial.unlink()
        os.close(handle)


def finish(partial: Path, target: Path) -> None:
    """Flush what was written to the disk, then give it its name. OSError."""
    with open(partial, "rb+") as f:
        os.fsync(f.fileno())
    os.replace(partial, target)
    _flush_folder(target.parent)


@contextmanager
def whole(path: str | os.PathLike[str], need: int = 0) -> Iterator[Path]:
    """A path to write to; it becomes `path` when the block ends, and is removed when the block raises.

    need: bytes the file will have, 0 when unknown; a disk with less room is refused before anything is written.
    Raises KvqError instead of OSError.
    """
    try:
        target = target_of(path)
    except OSError as e:
        raise refuse(Path(path), e) from e
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if need and shutil.disk_usage(target.parent).free < need:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with unfinished(target) as partial:
            yield partial
            finish(partial, target)
    except OSError as e:
        raise refuse(target, e, need) from e


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass  # some file systems know no such thing; the rename is atomic all the same
    finally:
        os.close(handle)


def read_text(path: str | os.PathLike[str], flag: str) -> str:
    """A text in UTF-8. KvqError, which names `flag`, for any other: calibrated on, it gives data of garbage."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise KvqError(f"{flag} {path} is no text in UTF-8 (byte {e.start}); convert it, or give a text") from e
    if "\0" in text:  # UTF-16 without its mark
        raise KvqError(f"{flag} {path} is no text in UTF-8 (it holds zero bytes); convert it, or give a text")
    return text


def append_line(path: str | os.PathLike[str], line: str) -> None:
    """Append one line and flush it to the disk; when that fails the file is as long as before. A last line without an
    end, as some editors leave it, gets one first. Raises KvqError.
    """
    target = Path(path)
    data = (line.rstrip("\n") + "\n").encode()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "ab+", buffering=0) as f:
            before, done = f.seek(0, os.SEEK_END), 0
            if before and os.pread(f.fileno(), 1, before - 1) != b"\n":
                data = b"\n" + data
            try:
                while done < len(data):
                    done += f.write(data[done:])
                os.fsync(f.fileno())
            except OSError:
                os.truncate(target, before)
                raise
    except OSError as e:
        raise refuse(target, e, len(data)) from e


def probe(path: str | os.PathLike[str]) -> None:
    """KvqError now, not after hours, when lines cannot be appended to `path`. A file that was not there is not left
    behind.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target = target_of(path)
        there = target.exists()
        with open(target, "ab"):
            pass
        if not there:
            target.unlink()
    except OSError as e:
        raise refuse(target, e) from e


@contextmanager
def alone(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Nobody else who asks so works on `path` in this block. KvqError, which names the process and `what` it runs, when
    one does. A lock lies beside the file and goes with the block; one that a killed process left holds nobody up.
    """
    pid = "unknown"
    try:
        target = target_of(path)
        lock = target.with_name(f".{target.name}.lock")
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = _hold(lock, fcntl.LOCK_NB)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        with suppress(OSError):
            pid = lock.read_text(errors="replace").strip() or pid
        raise KvqError(
            f"{path} is being written by another {what} (process {pid}); wait for it, or choose another file"
        ) from None
    except OSError as e:
        raise refuse(Path(path), e) from e
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(handle)
