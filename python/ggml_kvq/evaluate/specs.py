"""Cache specs: one string names a KV cache to evaluate.

f16                               upstream's f16 cache, the reference
upstream:q4_0/q4_0                upstream's cache types for K and V (one name: both)
kivi:bits=2,group=32              a method of this package with its options
aqua:predictor=full@calib.gguf    ... with calibrated data
aqua:predictor=bias@measured      ... with what is measured at a model's first use
auto:bits=2.25@none               ... without any, as in a program that loads the library by itself
method:f16                        this package's own f16 (control arm)
simulated:q4_0,window=128         an upstream type with an exact window, which upstream has not (simulate.py)
lab:mine.py:Mine,bits=2           a class of the laboratory, simulated (lab/)
small=kivi:bits=2                 any of these under a label of its own
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import default_means, gguf_header, methods, resolver
from ..core import llama
from ..core.kvstats import UPSTREAM
from ..core.model import Model
from ..errors import KvqError, MethodError
from ..lab import method as laboratory
from . import simulate

SIMULATED = " (simulated)"  # of a laboratory's label, in every table


@dataclass(frozen=True)
class CacheSpec:
    """One KV cache: label for tables, method (None: upstream's cache), options, sidecar path, upstream cache types."""

    text: str
    label: str
    method: str | None
    options: str = ""
    config: str | None = None
    type_k: str = "f16"
    type_v: str = "f16"
    simulated: tuple[str, int, int] | None = None  # type, window, first cells: simulate.Simulated
    lab: str = ""  # file.py:Class,option=value of the laboratory

    @property
    def spec(self) -> str:
        """What was asked for, without a label."""
        name = f"{self.label.removesuffix(SIMULATED)}="
        return self.text.removeprefix(name)

    @property
    def lab_file(self) -> str | None:
        """The file of a laboratory class."""
        return self.lab.partition(":")[0].partition(",")[0] or None

    @property
    def config_file(self) -> str | None:
        """The file of calibrated data, where the spec names one."""
        return None if self.config in (resolver.OFF, resolver.MEASURED) else self.config

    @property
    def is_reference(self) -> bool:
        return self.method is None and not self.simulated and (self.type_k, self.type_v) == ("f16", "f16")

    def check(self) -> None:
        """MethodError for a method, option or file that does not exist: found before anything is measured."""
        if self.method is None:
            return
        if self.lab:
            methods.check("lab", laboratory.load(self.lab).native_options())
            return
        if self.method in llama.GGML_TYPES and self.method != "f16":
            raise MethodError(
                f"cache {self.text!r}: {self.method} is a type of llama.cpp's own cache; write {UPSTREAM}:{self.method}"
            )
        methods.check(self.method, self.options)
        if self.config_file and not Path(self.config_file).is_file():
            raise MethodError(
                f"cache {self.text!r}: {self.config} is not a file; give the sidecar GGUF written by `ggml-kvq"
                " calibrate`"
            )

    def means(self, path: str | os.PathLike[str]) -> str | None:
        """Those of the text in this package, for a method that takes them off; no sidecar beside the model is used."""
        if not self.method:
            return None
        asked = resolver.Request(resolver.BY_ARGUMENTS, self.method, self.options, resolver.OFF)
        wanted = resolver.resolve(methods.library, asked, None)
        if self.config == resolver.MEASURED:
            return self.measured(path, wanted)
        if not wanted.wants_means:
            return None  # whatever the model holds
        wanted = resolver.resolve(methods.library, asked, gguf_header.read(path))
        return self.measured(path, wanted) if wanted.wants_means else None

    def measured(self, path: str | os.PathLike[str], wanted: resolver.Resolved) -> str | None:
        """What is measured at a model's first use, now if that was not yet. KvqError."""
        kind = wanted.first_use
        found, why = default_means.ensure(
            path, lambda line: print(f"ggml-kvq: {line}", file=sys.stderr), kind=kind, insist=wanted.insists
        )
        if why:  # a row without them would pass for one with them
            raise KvqError(f"cache {self.text!r} goes with {kind.word} of keys and values, which cannot be had: {why}")
        return found

    def open(self, path: Any, **kwargs: Any) -> Model:
        """A Model of `path` with this cache; kwargs go to Model."""
        if self.simulated:
            return simulate.Simulated(path, *self.simulated, **kwargs)
        if self.lab:
            return Model(path, "lab", lab=self.lab, **kwargs)
        if self.method is None:
            return Model(path, UPSTREAM, type_k=self.type_k, type_v=self.type_v, **kwargs)
        try:  # "none": what is measured is in the spec, not in a file that happens to lie beside the model
            given = self.config if self.config != resolver.MEASURED else None
            return Model(path, self.method, self.options or None, given or self.means(path) or resolver.OFF, **kwargs)
        except MethodError as e:
            raise MethodError(self.in_words(str(e))) from e

    def in_words(self, message: str) -> str:
        """What Python and programs say of lacking data, as it is written in a spec."""
        text = re.sub(r"pass kv_config='FILE.gguf'|give a sidecar with \S+", f"write {self.method}@FILE.gguf", message)
        without = r"(?:, or set (?:KVQ_OPTS=)?(\w+)=(\w+)| or kv_opts=\{'(\w+)': '(\w+)'\})"
        return re.sub(without, rf" or {self.method}:\1\3=\2\4", text)


_LABEL = re.compile(r"([A-Za-z0-9][\w.+-]*)=")


def _simulated(text: str, rest: str) -> tuple[str, int, int]:
    kind, *parts = rest.split(",")
    given = {"window": "128", "sinks": "0"}
    for part in parts:
        key, _, value = part.partition("=")
        if key not in given or not value.isdecimal():
            raise MethodError(f"cache {text!r}: {part!r} is no option; write window=CELLS or sinks=CELLS")
        given[key] = value
    if kind not in simulate.TYPES:
        raise MethodError(f"cache {text!r}: {kind!r} cannot be simulated; choose one of {', '.join(simulate.TYPES)}")
    return kind, int(given["window"]), int(given["sinks"])


def parse(text: str) -> CacheSpec:
    """Parse one spec; MethodError names the bad part. Method names and options are checked when the cache is opened."""
    body, label = text.strip(), ""
    match = _LABEL.match(body)
    if match and ":" not in body[: match.end()]:
        label, body = match.group(1), body[match.end() :]
    name, _, rest = body.partition(":")
    if "@" in name:  # no options: aqua@calib.gguf
        name, _, config = body.partition("@")
        rest = "@" + config
    if not name:
        raise MethodError(f"cache {text!r} names no method; write f16, upstream:q4_0/q4_0 or METHOD:key=value,...")
    if name == UPSTREAM or body == "f16":
        kinds = (rest or "f16").split("/")
        kinds = kinds * 2 if len(kinds) == 1 else kinds
        if len(kinds) != 2 or any(k not in llama.GGML_TYPES for k in kinds):
            raise MethodError(f"cache {text!r}: upstream takes TYPE or KTYPE/VTYPE of {', '.join(llama.GGML_TYPES)}")
        same = kinds[0] if kinds[0] == kinds[1] else "/".join(kinds)
        return CacheSpec(text, label or same, None, type_k=kinds[0], type_v=kinds[1])
    if name == "simulated":
        return CacheSpec(text, label or body, None, simulated=_simulated(text, rest))
    if name == "lab":
        if not rest:
            raise MethodError(f"cache {text!r} names no file; write lab:FILE.py:CLASS,option=value")
        return CacheSpec(text, (label or body) + SIMULATED, "lab", lab=rest)
    if name == "method":
        name, _, rest = rest.partition(":")
        if not name:
            raise MethodError(f"cache {text!r} names no method after 'method:'; write method:f16")
        label = label or f"kvq-{name}"
    options, _, config = rest.partition("@")
    if not re.fullmatch(r"\w+", name) or ":" in options:
        known, *others = filter(None, re.split(r"[\s,:]+", body.partition("@")[0].lstrip("=")))
        meant = f"write {known}:{','.join(others)}" if others else f"write {known}"
        raise MethodError(f"cache {text!r} is no METHOD:key=value,key=value; {meant}")
    for part in filter(None, options.split(",")):
        if "=" not in part:
            raise MethodError(f"cache {text!r}: option {part!r} has no value; write {part}=VALUE")
    return CacheSpec(text, label or body.split("@")[0], name, options, config or None)


def parse_built(text: str, lacks: str) -> CacheSpec:
    """parse(), but MethodError for a simulated cache, which has no `lacks`: no speed, no layout."""
    spec = parse(text)
    if spec.simulated or spec.lab:
        raise MethodError(f"cache {text!r} is simulated and has no {lacks}; measure it with ggml-kvq eval")
    return spec
