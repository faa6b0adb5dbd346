"""Threads and processes of a Model: the thread that computes, Ctrl-C, and what a forked child may not do."""

from __future__ import annotations

import os
import queue
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import ModelError

if TYPE_CHECKING:
    from .core.model import Model

T = TypeVar("T")

#: Every open Model of this process.
models: weakref.WeakSet[Model] = weakref.WeakSet()

_workers: list[_Worker] = []  # the first one stays
_workers_lock = threading.Lock()
_computed = False  # llama.cpp computed in this process: its threads exist
_forked = False  # this process was forked from one that had computed

#: Seconds after which a worker beside the first one ends.
LINGER = 0.5


class _Job:
    """A call that is made once, unless it was withdrawn before."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.claim, self.done = threading.Lock(), threading.Lock()
        self.done.acquire()
        self.finished = False
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        if not self.withdraw():
            return
        try:
            self.result = self.call()
        except BaseException as e:  # the caller's
            self.error = e
        self.finished = True
        self.done.release()

    def withdraw(self) -> bool:
        """False: it runs, or has run, or was withdrawn."""
        return self.claim.acquire(blocking=False)


class _Worker:
    """A thread that makes calls for others, one at a time."""

    def __init__(self, stays: bool) -> None:
        self.jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self.busy = False
        self.linger = None if stays else LINGER
        threading.Thread(target=self._run, name="ggml-kvq-compute", daemon=True).start()

    def is_free(self) -> bool:
        return not self.busy and self.jobs.empty()

    def _run(self) -> None:
        while True:
            try:
                job = self.jobs.get(timeout=self.linger)
            except queue.Empty:
                with _workers_lock:
                    if self.jobs.empty():
                        _workers.remove(self)
                        return
                continue
            self.busy = True
            job.run()
            self.busy = False
            del job  # what it returned is the caller's


def _submit(job: _Job) -> None:
    """To the first worker that is free. Its queue alone says so: an exception in between loses nothing."""
    with _workers_lock:
        worker = next((w for w in _workers if w.is_free()), None)
        if worker is None:
            worker = _Worker(stays=not _workers)
            _workers.append(worker)
        worker.jobs.put(job)


def compute(call: Callable[[], T], abort: Callable[[bool], object] | None = None) -> T:
    """What `call` returns or raises, called in the thread that computes for this process.

    OpenMP gives every thread that computes a team of threads. Teams that are together larger than the number of CPUs
    no longer spin between two operations, which takes up to twice the time. So calls that follow each other, from
    whatever threads, are made by one thread. Calls at the same time get a thread each, and those beyond the first end
    half a second later.

    Ctrl-C in the main thread ends the wait. abort(True) then asks the call to end, and abort(False) takes that back;
    without `abort` the call goes on. In both cases nothing leaves before the call has ended, because what it computes
    with may be freed next.
    """
    job = _Job(call)
    try:
        _submit(job)
        job.done.acquire()
    except BaseException:
        with interrupt_held():
            if not job.withdraw() and not job.finished:
                if abort is not None:
                    abort(True)
                job.done.acquire()
            if abort is not None:
                abort(False)
        raise
    if job.error is not None:
        raise job.error
    result: T = job.result
    return result


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
    global _workers_lock, _forked
    _workers_lock, _forked = threading.Lock(), _forked or _computed
    _workers.clear()
    if _forked:
        for model in list(models):
            model._forget()


os.register_at_fork(after_in_child=_after_fork)
