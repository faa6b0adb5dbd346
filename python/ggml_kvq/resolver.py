"""Which method, options and calibrated data hold. libggml-kvq decides (kvq_resolve; docs/llama-cpp.md, "What holds");
launchers and Model ask it here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from ctypes import CDLL, byref
from dataclasses import dataclass, fields
from enum import IntEnum

from . import gguf_header
from .core import native
from .errors import MethodError

BY_FLAGS, BY_ARGUMENTS = 1, 2  # enum kvq_asker: whose words messages use
MEASURED = "measured"  # config_from of data that the first use of a model left in the cache folder
OFF = "none"  # a method: llama.cpp's own cache; calibrated data: not those beside the model
_VARIABLES = {"env_method": "KVQ_METHOD", "env_opts": "KVQ_OPTS", "env_config": "KVQ_CONFIG"}


class FirstUse(IntEnum):
    """What the first use of a model measures, as kvq_measured numbers it."""

    MEANS = 0
    PREDICTORS = 1  # and means
    COORDINATES = 2  # and means

    @property
    def word(self) -> str:
        return self.name.lower()

    @property
    def ending(self) -> str:
        """Of the file."""
        return ".kvq.gguf" if self is FirstUse.MEANS else f".{self.word}.kvq.gguf"


@dataclass(frozen=True)
class Request:
    """What was asked for; None: not given. number: words for messages where a number of bits or bytes stands for a
    method ("--kv-bits 2.5"). env: variables that count.
    """

    asker: int
    method: str | None = None
    opts: str = ""
    config: str | None = None
    number: str = ""
    env: Mapping[str, str] | None = None

    @property
    def is_empty(self) -> bool:
        named = any((self.env or {}).get(name) for name in _VARIABLES.values())
        return self.method is None and not (self.opts or self.config or self.number or named)


@dataclass(frozen=True)
class Resolved:
    """kvq_resolved: the texts of ggml-kvq.h. method "": nobody names one."""

    method: str = ""
    method_from: str = ""
    method_words: str = ""
    opts: str = ""
    options: str = ""
    options_from: str = ""
    config: str = ""
    config_from: str = ""
    note: str = ""
    wants: FirstUse | None = None  # where nobody has given data

    @property
    def wants_means(self) -> bool:
        """Those of this model are to be measured, and perhaps more."""
        return self.wants is not None

    @property
    def first_use(self) -> FirstUse:
        """What the first use of a model measures for this, or has."""
        if self.wants is not None or self.config_from != MEASURED:
            return self.wants or FirstUse.MEANS
        return next((x for x in reversed(FirstUse) if self.config.endswith(x.ending)), FirstUse.MEANS)

    @property
    def insists(self) -> bool:
        """What is measured was asked for by its name: a model that cannot have it is refused."""
        return self.first_use is FirstUse.PREDICTORS or "coordinates=on" in self.opts.split(",")

    @property
    def file(self) -> str | None:
        """The file of calibrated data besides the model."""
        return None if self.config_from in ("", "embedded") else self.config


_TEXTS = [f.name for f in fields(Resolved) if f.name != "wants"]


def resolve(library: Callable[[], CDLL], request: Request, header: gguf_header.Header | None) -> Resolved:
    """The library's answer; header: of the model, None when it is not known. Where nobody asks for anything the library
    is not loaded. MethodError names the value and the cure.
    """
    if request.is_empty and not (header and header.kvq()):
        return Resolved()
    lib, env = library(), request.env or {}

    def text(value: str | None) -> bytes | None:
        return None if value is None else os.fsencode(value)

    asked = native.kvq_request(
        asker=request.asker,
        method=text(request.method),
        opts=text(request.opts),
        config=text(request.config),
        number=text(request.number),
        model=text(header.path if header else None),
        **{field: text(env.get(name)) for field, name in _VARIABLES.items()},
    )
    answer = native.kvq_resolved()
    native.check(lib, lib.kvq_resolve(byref(asked), byref(answer)))
    texts = {name: os.fsdecode(getattr(answer, name)) for name in _TEXTS}
    wants = int(answer.wants_means)
    return Resolved(**texts, wants=FirstUse(wants - 1) if wants else None)


def planned(
    library: Callable[[], CDLL], method: str, opts: str, config: str | None, header: gguf_header.Header
) -> tuple[str, bool]:
    """(options of a method as this model's cache will have them, those of its data among them; does its first use
    measure it?). Data that do not hold change nothing here: who opens the model is told.
    """
    try:
        got = resolve(library, Request(BY_ARGUMENTS, method, opts, config), header)
    except MethodError:
        return opts, False
    chooses = method == "auto" and "means=" not in got.options and (got.wants_means or got.config_from)
    return ",".join(filter(None, (got.options, "means=on" if chooses else ""))), got.wants_means
