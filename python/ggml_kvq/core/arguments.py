"""Arguments of Model, checked: a wrong type or a text that has no bytes raises one line, not a trace from the middle
of ctypes.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .. import budget, cpu_layers, cpus, default_means, gguf_header, memory, progress, resolver
from ..errors import ArgumentTypeError, BudgetError, DecodeError, KvqError, MethodError, ModelError, TextError
from . import choices, llama, native
from .kvstats import UPSTREAM
from .loader import Libraries
from .sampling import Sampling

if TYPE_CHECKING:
    from .model import Model

OFF = resolver.OFF  # kv_method: as "upstream"


def count(name: str, value: Any, low: int) -> int:
    """A number of tokens: an int, or a size like "32k". ArgumentTypeError, ModelError."""
    if isinstance(value, str):
        try:
            value = memory.tokens(value)
        except (ValueError, IndexError):
            raise ArgumentTypeError(f"{name}={value!r} is no number of tokens; pass 32768 or '32k'") from None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentTypeError(f"{name}={value!r} is a {type(value).__name__}; pass a whole number of tokens")
    number = int(value)
    if number < low:
        raise ModelError(f"{name}={number} is too small; choose {low} or more")
    if number > memory.MOST:
        raise ModelError(f"{name}={number} is too large; choose {memory.MOST} or less")
    return number


def sequences(value: Any, n_batch: int) -> int:
    """n_seq_max. ModelError when a batch has no room for a token of each: llama.cpp would end the process."""
    n_seq_max = count("n_seq_max", value, 1)
    if n_batch < n_seq_max:
        raise ModelError(f"n_batch={n_batch} is less than n_seq_max={n_seq_max}; pass n_batch={n_seq_max} or more")
    return n_seq_max


def whole(name: str, value: Any) -> int:
    """A whole number of any size. ArgumentTypeError."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentTypeError(f"{name}={value!r} is a {type(value).__name__}; pass a whole number")
    return int(value)


def check_layers(kv_method: str | None, n_gpu_layers: int | None, n_layer: int) -> None:
    """MethodError for n_gpu_layers=0, which leaves a method no layer; a warning where it leaves some out."""
    if kv_method is None or n_gpu_layers is None:
        return
    if n_gpu_layers == 0:
        raise MethodError(
            f"n_gpu_layers=0 leaves the KV cache of every layer to llama.cpp, so kv_method={kv_method} would not be"
            " used: drop n_gpu_layers"
        )
    if kv_method == cpu_layers.EXACT and 0 < n_gpu_layers <= n_layer:
        warnings.warn(
            f"n_gpu_layers={n_gpu_layers}: {n_layer + 1 - n_gpu_layers} of {n_layer} layers keep llama.cpp's own f16"
            " cache, which kv_stats() does not count; drop n_gpu_layers to keep all in ours",
            stacklevel=4,
        )


def weights_on_cpu(path: Path, kv_method: str | None, n_gpu_layers: int | None, n_devices: int) -> str:
    """Regular expression of the weights that n_gpu_layers leaves to the CPU, while a method has the caches of all
    layers; "": whole layers, as llama.cpp does it. Over several devices it shares out layers by number.
    """
    if kv_method in (None, UPSTREAM, cpu_layers.EXACT) or n_gpu_layers is None or n_gpu_layers <= 0 or n_devices > 1:
        return ""
    n_layer = cpu_layers.n_layer(gguf_header.read(path).fields)
    left = cpu_layers.on_cpu(n_gpu_layers, n_layer) if n_layer else 0
    return cpu_layers.weights_of(left) if left else ""


def threads(value: Any) -> int:
    """n_threads; None: as many as there are CPUs for this process."""
    number = min(cpus.available(), 512) if value is None else whole("n_threads", value)
    if not 0 < number <= 512:
        raise ModelError(f"n_threads={number} is outside 1..512; pass None for all CPUs")
    return number


def devices(value: Any) -> list[str] | None:
    """device: a name, names, or None."""
    names = [value] if isinstance(value, str) else value
    if names is not None and (not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names)):
        raise ArgumentTypeError(
            f"device={value!r} is a {type(value).__name__}; pass a name, as 'KVQ0', or a list of names"
        )
    return None if names is None else list(names)


def stops(value: Any) -> list[str]:
    """stop: a text or texts that end a generation."""
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise ArgumentTypeError(f"stop={value!r} is a {type(value).__name__}; pass a text or a list of texts")
    out = [value] if isinstance(value, str) else list(value)
    for text in out:
        utf8(text)
        if not text:
            raise KvqError("stop='' would end every text at once; drop the empty string")
    return out


def path(value: Any, name: str = "path") -> str:
    """A file name. ArgumentTypeError for what is none."""
    if isinstance(value, bytes) or not isinstance(value, str | os.PathLike):
        raise ArgumentTypeError(f"{name}={value!r} is a {type(value).__name__}; pass a str or a pathlib.Path")
    return os.fspath(value)


def method(value: Any) -> str | None:
    """kv_method; "none" is another name of "upstream"."""
    if value is not None and not isinstance(value, str):
        raise ArgumentTypeError(f"kv_method={value!r} is a {type(value).__name__}; pass a name, as 'kivi'")
    return UPSTREAM if value == OFF else value


def options(value: Any) -> str:
    """kv_opts as "key=value,key=value"."""
    if value is None or isinstance(value, str):
        return native.option_string(value)
    if not isinstance(value, Mapping):
        raise ArgumentTypeError(
            f"kv_opts={value!r} is a {type(value).__name__}; pass a dict, as {{'bits': 2}}, or a str, as 'bits=2'"
        )
    return native.option_string(dict(value))


def at_least(name: str, value: Any, low: int) -> int:
    """A whole number not below `low`. ArgumentTypeError, KvqError."""
    number = whole(name, value)
    if number < low:
        raise KvqError(f"{name}={number} is too small; choose {low} or more")
    return number


def flag(name: str, value: Any) -> bool:
    """True or False, and nothing that only counts as one of them ("no" is true). ArgumentTypeError."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentTypeError(f"{name}={value!r:.60} is a {type(value).__name__}; pass True or False")
    return bool(value)


def cache_type(name: str, value: Any) -> str:
    """type_k or type_v. MethodError."""
    if not isinstance(value, str) or value not in llama.GGML_TYPES:
        raise MethodError(f"{name}={value!r} is no cache type; choose one of {', '.join(llama.GGML_TYPES)}")
    return value


def sampling(value: Any, fields: Mapping[str, Any]) -> Sampling:
    """What generate() got of it: a Sampling, or its fields. KvqError."""
    if value is not None and not isinstance(value, Sampling):
        raise ArgumentTypeError(f"sampling={value!r} is a {type(value).__name__}; pass a Sampling(...)")
    if value is not None and fields:
        raise KvqError(f"sampling and {', '.join(fields)} given together; put all into Sampling(...)")
    unknown = [key for key in fields if key not in Sampling.__dataclass_fields__]
    if unknown:
        known = ", ".join(Sampling.__dataclass_fields__)
        raise KvqError(f"unknown sampling option {', '.join(unknown)}; choose from {known}")
    return value or Sampling(**fields)


def utf8(text: Any) -> bytes:
    """Bytes of a text. ArgumentTypeError for bytes and other types, TextError for lone surrogates."""
    if not isinstance(text, str):
        hint = "; decode it first: text.decode()" if isinstance(text, bytes | bytearray) else ""
        raise ArgumentTypeError(f"{text!r:.60} is a {type(text).__name__}, not a text{hint}")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise TextError(
            f"the text has a lone surrogate at position {e.start} ({text[e.start]!r}): it came from bytes that are no"
            " UTF-8; read them with errors='replace'"
        ) from None


def token_ids(tokens: Any, n_vocab: int) -> list[int]:
    """Token ids. ArgumentTypeError for bytes and what holds no whole numbers, DecodeError for one outside the
    vocabulary.

    llama.cpp ends the process at such an id.
    """
    if isinstance(tokens, str):
        raise ArgumentTypeError(f"{tokens!r:.60} is a text; pass token ids, as tokenize() gives them")
    if isinstance(tokens, bytes | bytearray) or not isinstance(tokens, Iterable):
        utf8(tokens)
    out = []
    for token in tokens:
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise ArgumentTypeError(
                f"token {token!r} is a {type(token).__name__}; pass a text, or token ids as tokenize() gives them"
            )
        if not 0 <= int(token) < n_vocab:
            raise DecodeError(f"token {token} is outside the vocabulary of {n_vocab}; tokenize with this model")
        out.append(int(token))
    return out


def id_array(tokens: Any, n_vocab: int) -> npt.NDArray[np.int32]:
    """Token ids, int32 [n]. As token_ids(), and an array of another shape or of fractions is an ArgumentTypeError."""
    if not isinstance(tokens, np.ndarray):
        return np.asarray(token_ids(tokens, n_vocab), np.int32)
    if tokens.ndim != 1 or (tokens.dtype.kind not in "iu" and tokens.size):
        raise ArgumentTypeError(
            f"tokens are an array of {tokens.dtype} and shape {tokens.shape}; pass whole numbers, one axis"
        )
    wrong = tokens[(tokens < 0) | (tokens >= n_vocab)]
    if wrong.size:
        raise DecodeError(f"token {wrong[0]} is outside the vocabulary of {n_vocab}; tokenize with this model")
    return np.ascontiguousarray(tokens, np.int32)


def outputs(wanted: Any, n_tokens: int) -> npt.NDArray[np.int8]:
    """Which tokens' logits to compute, int8 [n_tokens]; None: the last one's. ArgumentTypeError."""
    if wanted is None:
        mask = np.zeros(n_tokens, np.int8)
        mask[-1:] = 1
        return mask
    given = np.asarray(wanted)
    if given.shape != (n_tokens,) or given.dtype.kind not in "biuf":
        raise ArgumentTypeError(
            f"outputs are of {given.dtype} and shape {given.shape}; pass a bool for each of the {n_tokens} tokens"
        )
    return given.astype(bool).astype(np.int8)


@dataclass(frozen=True)
class Choice:
    """What kv_method, kv_opts, kv_config, kv_bits and kv_budget come to. method None: as upstream. config: of the
    context, "none" for no file besides the model.
    """

    method: str | None
    opts: str
    config: str
    asked: str = ""  # for the load line, where it differs from opts


@dataclass(frozen=True)
class Asked:
    """Those arguments as they were given, for one model and a context of this size."""

    libs: Libraries
    model: Path
    method: str | None
    opts: str
    config: Any
    bits: Any
    room: Any
    want: budget.Context

    @property
    def counts(self) -> str:
        """What stands for the method auto; "": nothing does."""
        return "" if self.bits is None and self.room is None else "kv_bits"

    def number(self, opts: str) -> str:
        """kv_bits and kv_budget as an option of method auto with these options, those of calibrated data among them.
        MethodError; BudgetError names what works.
        """
        bits = None if self.bits is None else budget.bits(str(self.bits), "kv_bits")
        facts = memory.model(self.model)
        if self.room is None:
            if facts:
                with_bits = ",".join(filter(None, (opts, f"bits={bits:g}")))
                budget.refuse_bits_below_least(facts, with_bits, f"kv_bits={bits:g}", "pass kv_opts='pairs=none'")
            return f"bits={bits:g}"
        if facts is None:
            raise MethodError(f"{self.model} describes no attention layers; kv_budget has nothing to divide")
        n_ctx = self.want.n_ctx or facts.n_ctx_train * self.want.n_stream
        n_bytes = budget.size(str(self.room), "kv_budget")
        facts = memory.with_whole_windows(facts)  # as llama.context_params asks for them
        size = budget.Context(n_ctx, self.want.n_stream, self.want.n_ubatch)
        try:
            return budget.fit(facts, n_bytes, size, opts, most_bits=bits or 16.0).option
        except BudgetError as e:
            text = str(e).replace("give -c with --kv-budget", "give n_ctx")
            raise BudgetError(f"kv_budget={self.room}: {re.sub(r'-c (?=[0-9])', 'n_ctx=', text)}") from None

    def warn_beyond(self, opts: str) -> None:
        """Of more bits than method auto has."""
        facts = memory.model(self.model)
        top = budget.beyond(facts, opts, float(self.bits)) if facts and self.bits is not None else 0.0
        if top:
            warnings.warn(
                f"kv_bits={self.bits}: auto ends at {top:.2g} bits; for more pass kv_method='kivi',"
                " kv_opts={'bits': 4}, or kv_method='f16'",
                stacklevel=4,
            )

    def resolved(self, opts: str, header: gguf_header.Header | None) -> resolver.Resolved:
        """The library's answer."""
        given = None if self.config is None else path(self.config, "kv_config")
        asked = resolver.Request(resolver.BY_ARGUMENTS, self.method, opts, given, self.counts)
        return resolver.resolve(self.libs.need_kvq, asked, header)


def chosen(asked: Asked, n_threads: int, type_k: str, type_v: str) -> Choice:
    """What holds. A model that is seen for the first time is measured, where the method goes better with it.
    MethodError, BudgetError; GgufError when the model alone could name a method and is no GGUF.
    """
    if asked.method == UPSTREAM and not asked.counts:
        given = "" if asked.config in (None, OFF) else path(asked.config, "kv_config")
        choices.check_method(UPSTREAM, asked.opts, given, type_k, type_v)
        return Choice(UPSTREAM, asked.opts, OFF)
    if asked.method in llama.GGML_TYPES and asked.method != "f16":
        kind = asked.method
        raise MethodError(
            f"kv_method={kind!r} is a type of llama.cpp's own cache: pass kv_method='upstream', type_k={kind!r},"
            f" type_v={kind!r}"
        )
    try:
        header = gguf_header.read(asked.model)
    except gguf_header.GgufError:
        if asked.method is None:
            raise
        header = None  # llama.cpp tells what is wrong with it
    out = asked.resolved(asked.opts, header)
    if asked.counts:  # what cannot be met is refused before anything is measured
        asked.number(out.options)
    method, opts = out.method or None, out.opts or asked.opts
    choices.check_method(method, opts, out.config, type_k, type_v)
    config, words = data(asked.model, out, asked.config, n_threads), ""
    if asked.counts:
        options = asked.resolved(asked.opts, header).options
        number = asked.number(options)
        asked.warn_beyond(options)
        opts = asked.resolved(",".join(filter(None, (asked.opts, number))), header).opts
        words = f"kv_budget={asked.room}" if asked.room is not None else ""
    return Choice(method, opts, config, words)


def data(model: Path, found: resolver.Resolved, config: Any, n_threads: int) -> str:
    """kv_config of the context: the file of calibrated data; for a method that goes better with means, and that nobody
    gave any, those of the text that comes with this package (default_means). "none": no file besides the model.
    """
    measured = found.wants_means or found.config_from == resolver.MEASURED
    if config is not None or not measured:
        return found.file or OFF
    line = progress.Line()
    there, why = default_means.ensure(
        model,
        lambda text: print(f"ggml-kvq: {text}", file=sys.stderr, flush=True),
        n_threads,
        line,
        kind=found.first_use,
        insist=found.insists,
    )
    line.clear()
    if why and found.insists:
        raise MethodError(f"{default_means.asked(found.first_use)} {why}")
    if why:
        print(f"ggml-kvq: no means are taken off keys and values: {why}", file=sys.stderr)
    return there or OFF


def in_python(e: MethodError) -> MethodError:
    """The library's message, which names a launcher's flags, in Python's words."""
    text = re.sub(
        r"give a sidecar with --kv-config (\(.*?\)), or set (\w+)=(\w+)",
        r"pass kv_config='FILE.gguf' \1 or kv_opts={'\2': '\3'}",
        str(e),
    )
    text = re.sub(r"\bset (pairs|order|predictor)=none", r"pass kv_opts='\1=none'", text)
    return MethodError(text.replace("--kv-config none", "kv_config='none'"))


def describe(model: Model) -> str:
    """repr of a Model: what it was opened with, what it holds."""
    name = getattr(getattr(model, "path", None), "name", "?")
    if getattr(model, "_ctx", None) is None:
        return f"<Model {name} (closed)>"
    options = f" [{model._options}]" if model._options else ""
    return f"<Model {name} kv_method={model.kv_method}{options} n_ctx={model.n_ctx}, {len(model._tokens)} tokens held>"
