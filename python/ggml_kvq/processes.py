"""Threads and processes of a Model: decoding that Ctrl-C may end, and what a forked child may not do."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from .errors import ModelError

if TYPE_CHECKING:
    from .model import Model

#: Every open Model of this process.
models: weakref.WeakSet[Model] = weakref.WeakSet()

_worker_lock = threading.Lock()
_worker: ThreadPoolExecutor | None = None
_computed = False  # llama.cpp computed in this process: its threads exist
_forked = False  # this process was forked from one that had computed


def run_interruptible(model: Model, call: Any) -> Any:
    """Run `call` on a helper thread while the main thread stays open to Ctrl-C, which aborts the running
    llama_decode. Nothing leaves before the helper is at its end: what it computes with may be freed next.
    """
    global _worker
    with _worker_lock:
        if _worker is None:
            _worker = ThreadPoolExecutor(1, thread_name_prefix="ggml-kvq-decode")
    future: Future[Any] | None = None
    try:
        with interrupt_held():  # a call that runs is one that is known here
            future = _worker.submit(call)
        return future.result()
    except BaseException:
        with interrupt_held():
            if future is not None and not future.done():
                model._abort[0] = b"\x01"
                wait([future])
        raise
    finally:
        model._abort[0] = b"\x00"


@contextmanager
def interrupt_held() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, and so does SIGTERM where Python handles it.

    llama.cpp calls Python there (its log). A KeyboardInterrupt cannot pass through C: Python would print it and go on.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    held = {number: handler for number, handler in before.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread() or not held:
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    for number in held:
        signal.signal(number, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        if came:
            held[signal.Signals(came[0][0])](*came[0])


def note_computing() -> None:
    """llama.cpp's threads start now: a child forked from here on has none of them."""
    global _computed
    _computed = True


def check_not_forked() -> None:
    """ModelError in a child that was forked from a process whose llama.cpp had computed: its threads would be
    waited for for ever.
    """
    if _forked:
        raise ModelError(
            f"process {os.getpid()} was forked from one that had used a Model, and llama.cpp's threads did not come"
            ' along; start processes with multiprocessing.get_context("spawn"), or open models only in the children'
        )


def _after_fork() -> None:
    """In the child: forget the parent's contexts without freeing them, and the locks that its threads may hold."""
    global _worker, _worker_lock, _forked
    _worker, _worker_lock, _forked = None, threading.Lock(), _forked or _computed
    if _forked:
        for model in list(models):
            model._forget()


os.register_at_fork(after_in_child=_after_fork)
