"""A laboratory method at work in one Model: calls of the library reach the class, errors reach the caller."""

from __future__ import annotations

import ctypes
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..core import native
from ..errors import LabError, MethodError
from .method import Method, check, load
from .page import Before, Cells, Decoded, Page, bits_of, check_bits, check_levels, pairs_of, rows_of

_BEFORE_K, _BEFORE_V, _QUERIES = range(3)  # enum kvq_lab_what


def asked(kv_method: str | None, lab: Any, opts: str) -> Method:
    """What Model's arguments kv_method, lab and kv_opts name; MethodError."""
    if kv_method != "lab":
        raise MethodError(f"lab={lab!r} goes with kv_method='lab', not with {kv_method!r}")
    given = dict(part.split("=", 1) for part in filter(None, opts.split(",")))
    if isinstance(lab, str):
        return load(lab, given)
    if not isinstance(lab, Method):
        raise MethodError(f"lab={lab!r} is a {type(lab).__name__}; pass an object of a Method, or 'file.py:Class'")
    check(lab)
    if given:
        raise MethodError(f"kv_opts={opts!r} beside an object that has its options; pass {type(lab).__name__}({opts})")
    return lab


def named(load_line: str, lab: Session | None) -> str:
    """The load line with the class in place of "a program"."""
    who = f", as {lab.method.describe()} leaves them" if lab else " as they came: no class was given (lab=)"
    return load_line.replace(", whatever a program makes of them", who)


class Session:
    """stop(True) asks the llama_decode that runs to end."""

    def __init__(self, kvq: ctypes.CDLL, method: Method, stop: Callable[[bool], object]) -> None:
        self.method = method
        self._kvq, self._stop = kvq, stop
        self._error: LabError | None = None
        self._guard = threading.Lock()
        self._thread: int | None = None  # that runs the class at this moment
        self._where = ""
        self._scores: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}  # of positions, by layer and stream
        self._held: dict[tuple[int, int], tuple[int, int]] = {}  # cells that are held, and all that sealed
        self._row = 0  # channels of a key and a value of a head
        self._bits: dict[int, np.ndarray] = {}  # by layer: bits of keys, of values, and how many of each
        self._struct = native.kvq_lab(
            None,
            native.SEAL(self._seal),
            native.JUDGE(self._judge) if method.evicts else native.JUDGE(),
            method.n_observed,
            int(method.wants_queries),
        )

    @contextmanager
    def offered(self) -> Iterator[None]:
        """Caches that this thread creates meanwhile call this session."""
        self._kvq.kvq_lab_set(ctypes.byref(self._struct))
        try:
            yield
        finally:
            self._kvq.kvq_lab_set(None)

    # ------------------------------------------------------------ errors

    def check(self) -> None:
        """LabError when the class failed: the rows behind that are none of the method's."""
        if self._error is not None:
            raise self._error

    def interrupt(self) -> None:
        """KeyboardInterrupt in the class, wherever it is."""
        with self._guard:
            if self._thread is not None:
                thread, what = ctypes.c_ulong(self._thread), ctypes.py_object(KeyboardInterrupt)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, what)

    def _run(self, work: Callable[[], None]) -> int:
        """0, or 1 when the class failed. Nothing may leave it: there is C above."""
        try:
            try:
                with self._guard:
                    self._thread = threading.get_ident()
                work()
            finally:
                with self._guard:
                    self._thread = None
        except BaseException as e:
            self._error = self._explained(e)
            self._stop(True)
            return 1
        return 0

    def _explained(self, e: BaseException) -> LabError:
        """One line: file and line, class, where in the cache, what."""
        name = type(self.method).__name__
        if isinstance(e, KeyboardInterrupt):
            return LabError(f"{name} was interrupted at {self._where}; open the model again")
        file = self.method.source().rpartition(":")[0]
        frames = [f for f in traceback.extract_tb(e.__traceback__) if Path(f.filename).name == file]
        own = "scores" if "cells of" in self._where else "seal"
        at = f"{file}:{frames[-1].lineno}" if frames else self.method.source(own)
        what = str(e) if isinstance(e, ValueError) and not frames else f"{type(e).__name__}: {e}"
        return LabError(f"{at}: {name}, {self._where}: {' '.join(what.split())}")

    # ------------------------------------------------------------ calls of the library

    def _seal(self, user: Any, given: Any) -> int:
        return self._run(lambda: self._sealed(given.contents))

    def _sealed(self, c: native.kvq_lab_page) -> None:
        page = self._page(c)
        self._where = page.where()
        out = self.method.seal(page)
        self._where = page.where()
        if not isinstance(out, Decoded):
            raise ValueError(f"seal() gave a {type(out).__name__} back; give Decoded(keys=..., values=..., bits=...)")
        if out.keys is not None and out.keys_before is not None:
            raise ValueError("seal() gave keys and keys_before back; give one of them")
        if out.keys_before is not None:
            keys = page.turn(rows_of(out.keys_before, "keys_before", page.keys))
            keys = rows_of(keys, "keys", page.keys)
        else:
            keys = rows_of(out.keys, "keys", page.keys)
        values = rows_of(out.values, "values", page.values)
        bits = bits_of(out.bits)
        check_levels(keys, out.key_levels, "key_levels")
        check_levels(values, out.value_levels, "value_levels")
        for rows, back, own, name in ((page.keys, keys, bits[0], "keys"), (page.values, values, bits[1], "values")):
            check_bits(rows, back.astype(np.float16), own, name)
        np.ctypeslib.as_array(c.new_keys, keys.shape)[:] = keys
        np.ctypeslib.as_array(c.new_values, values.shape)[:] = values
        tally = self._bits.setdefault(page.layer, np.zeros(4))
        tally += bits[0] * keys.size, bits[1] * values.size, keys.size, values.size

    def _page(self, c: native.kvq_lab_page) -> Page:
        shape, self._row = (c.n_pages, c.page_cells), c.head_size_k + c.head_size_v
        keys = np.ctypeslib.as_array(c.keys, (*shape, c.n_head, c.head_size_k))
        values = np.ctypeslib.as_array(c.values, (*shape, c.n_head, c.head_size_v))
        for given in (keys, values):
            given.flags.writeable = False

        def rows(what: int, size: tuple[int, ...]) -> np.ndarray:
            out = np.empty(size, np.float32)
            if self._kvq.kvq_lab_rows(c.handle, what, out.ctypes.data_as(ctypes.POINTER(ctypes.c_float))):
                raise LabError("the layer before does not hold these pages; report this as a bug")
            return out

        def turn(keys: np.ndarray, back: bool, before: bool = False) -> np.ndarray:
            out = np.array(keys, np.float32, order="C")
            at = out.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            self._kvq.kvq_lab_turn(c.handle, int(before), int(back), at)
            return out

        def ask(what: str) -> Any:
            if what == "queries" and not self.method.wants_queries:
                raise AttributeError("page.queries is not filled; write wants_queries = True in the class")
            if what == "queries":
                return rows(_QUERIES, (c.n_head, c.head_size_k))
            if not c.before_head:
                return None
            k = rows(_BEFORE_K, (*shape, c.before_head, c.before_k))
            return Before(k, turn(k, True, True), rows(_BEFORE_V, (*shape, c.before_head, c.before_v)))

        return Page(
            layer=c.il,
            layer_before=c.before_il if c.before_head else None,
            stream=c.stream,
            numbers=[c.pages[i] for i in range(c.n_pages)],
            positions=np.ctypeslib.as_array(c.positions, shape).copy(),
            keys=keys,
            values=values,
            pairs=pairs_of(c.n_dims, bool(c.neox)),
            ask=ask,
            turn=turn,
        )

    def _judge(self, user: Any, given: Any) -> int:
        return self._run(lambda: self._judged(given.contents))

    def _judged(self, c: native.kvq_lab_cells) -> None:
        size, at = (c.n_head, c.n_cells), (c.il, c.stream)
        self._where = f"layer {c.il}, {c.n_cells} cells of sequence {c.stream}"
        held = np.ctypeslib.as_array(c.held, size)
        positions = np.ctypeslib.as_array(c.positions, (c.n_cells,)).copy()
        sealed = np.ctypeslib.as_array(c.sealed, (c.n_cells,)).astype(bool)
        if self.method.sinks:
            sealed &= positions >= self.method.sinks
        scores = np.zeros(size, np.float32)
        if at in self._scores:
            before, last = self._scores[at]
            n = min(len(before), c.n_cells)
            scores[:, :n] = np.where(positions[:n] == before[:n], last[:, :n], 0)  # others were written since
        if c.probabilities:  # else these cells were scored in this step, and some of them have sealed since
            probabilities = np.ctypeslib.as_array(c.probabilities, size).copy()
            n = c.n_queries
            cells = Cells(c.il, c.stream, positions, sealed, held.astype(bool), probabilities, scores, n)
            scores = np.asarray(self.method.scores(cells), np.float32)
            if scores.shape != size:
                raise ValueError(f"scores have the shape {scores.shape}; give {size} (heads, cells)")
            if np.isnan(scores).any():
                raise ValueError("scores hold nan; give numbers, -inf for a cell that goes first")
        self._scores[at] = positions, scores
        n_sealed = int(sealed.sum())
        n_keep = int(np.ceil(self.method.keep * n_sealed))
        for h in range(c.n_head):
            there = np.flatnonzero(sealed & (held[h] > 0))
            if len(there) > n_keep:  # of equals the newest stay
                order = there[np.lexsort((positions[there], scores[h, there]))]
                held[h, order[: len(order) - n_keep]] = 0
        self._held[at] = int((held[:, sealed] > 0).sum()), n_sealed * c.n_head

    # ------------------------------------------------------------ what it would take

    def share(self) -> float:
        """Of the sealed cells that are held, over layers and heads."""
        held, all_of = (sum(x[i] for x in self._held.values()) for i in (0, 1))
        return held / all_of if all_of else 1.0

    def stats(self, found: dict[str, Any]) -> dict[str, Any]:
        """kv_stats of the cache that is simulated. Codes: what seal() declared, the mean over layers, times the share
        of cells that are held, and 32 bits for the number of a held cell of a head where cells are evicted. Window,
        sinks and page tables as the library has them.
        """
        tally = np.array(list(self._bits.values()))
        widths = tally[:, 2:] if len(tally) else np.ones((1, 2))
        bits = tally[:, :2] / widths if len(tally) else np.full((1, 2), 16.0)
        k, v = (bits * (widths / widths.sum(0))).sum(0)
        share = self.share()
        slots = 32 / self._row if self.method.evicts and self._row else 0.0
        codes = [float((x + slots) * share) for x in (k, v)]
        n_bytes = int(found["bytes_f16"])
        open_bits = 16 * (found["bytes_window"] + found["bytes_tables"]) / n_bytes
        tables = 16 * self.method.table_bytes / n_bytes
        all_bits = sum(codes) / 2 + open_bits + tables
        return {
            **found,
            "method": "lab",
            "simulated": True,
            "options": self.method.describe(),
            "bytes_codes": 0,
            "bytes_params": 0,
            "bits": all_bits,
            "bits_k": codes[0] + open_bits + tables,
            "bits_v": codes[1] + open_bits + tables,
            "bits_no_window": sum(codes) / 2 + tables,
            "bytes_total": int(n_bytes * all_bits / 16),
            "share_held": share,
        }
