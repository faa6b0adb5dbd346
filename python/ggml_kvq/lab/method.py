"""The base of laboratory methods: a dataclass whose fields are its options."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
import numbers
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import MethodError
from .page import Cells, Decoded, Page

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    from .page import Rows, Sample
else:

    def dataclass_transform():
        return lambda cls: cls


def _of_bases(cls: type) -> dict[str, Any]:
    """Types of the options of its bases that the class gives another default and no type; MethodError."""
    out: dict[str, Any] = {}
    for of_base in fields(cls):
        name = of_base.name
        if name not in cls.__dict__ or name in inspect.get_annotations(cls) or not of_base.init:
            continue
        value, usual = cls.__dict__[name], of_base.default
        fits = isinstance(value, (int, float) if isinstance(usual, float) else type(usual))
        if not fits or isinstance(value, bool) != isinstance(usual, bool):
            raise MethodError(
                f"{cls.__name__}: {name}={value!r} is no {type(usual).__name__}; its default is {usual!r}"
            )
        if isinstance(usual, float):
            setattr(cls, name, float(value))  # keep = 1 takes keep=0.5 from the command line, too
        out[name] = of_base.type
    return out


@dataclass_transform()
@dataclass
class Method:
    """A KV cache method. A subclass is made a dataclass, and its fields with defaults are its options.

    window: newest cells that stay as they came, besides the page being filled. sinks: first cells that stay. page:
    cells of a page, 32, 64, 128 or 256. keep: share of the sealed cells that stay, of each KV head, where there are
    `scores`. text: file that fit() gets a sample of, "": the text of this package.
    """

    window: int = 128
    sinks: int = 0
    page: int = 32
    keep: float = 1.0
    text: str = ""
    #: bytes of the method's tables for the whole model (means, predictors, grids of its own): set it in fit()
    table_bytes: int = field(default=0, init=False)
    _fitted: str = field(default="", init=False, repr=False)

    #: fill Page.queries
    wants_queries: ClassVar[bool] = False
    #: newest query tokens of a step that Cells.probabilities are of
    n_observed: ClassVar[int] = 32
    #: most tokens of the sample for fit()
    fit_tokens: ClassVar[int] = 4096

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__annotations__ = {**_of_bases(cls), **inspect.get_annotations(cls)}
        for name, kind in inspect.get_annotations(cls).items():
            default = cls.__dict__.get(name)
            if not str(kind).startswith(("ClassVar", "typing.ClassVar")) and not isinstance(
                default, (bool, int, float, str)
            ):
                raise MethodError(
                    f"option {name} of {cls.__name__} needs a default, a number or a text; write {name}: int = 2"
                )
        dataclass(cls)

    def seal(self, page: Page) -> Decoded:
        """Encode and decode a run of pages. The one function that a method must have."""
        raise NotImplementedError(f"{type(self).__name__} has no seal(page)")

    def scores(self, cells: Cells) -> Rows:
        """Score of every cell, [heads, cells]: of the sealed ones `keep` of those that were written stay, by score."""
        raise NotImplementedError

    def fit(self, sample: Sample) -> None:
        """Once before: means, covariances, predictors of the model at hand."""

    # ------------------------------------------------------------ what the laboratory asks

    @property
    def evicts(self) -> bool:
        return type(self).scores is not Method.scores

    def prepare(self, path: str | os.PathLike[str], n_threads: int | None = None) -> None:
        """fit(), where the class has one, on a sample of the model at `path`. Once for a model."""
        if type(self).fit is Method.fit or self._fitted == os.fspath(path):
            return
        from . import sample

        with sample.explained(self):
            self.fit(sample.take(path, self.text, self.fit_tokens, n_threads))
        check_tables(self)
        self._fitted = os.fspath(path)

    def native_options(self) -> str:
        """Options of the library's method lab."""
        return f"window={self.window},sinks={self.sinks},page={self.page}"

    def describe(self) -> str:
        """Class and options that are not the default: "Mine bits=3"."""
        options = [(f.name, getattr(self, f.name), f.default) for f in fields(self) if f.init]
        given = [f"{name}={value}" for name, value, default in options if value != default]
        return " ".join([type(self).__name__, *given])

    @classmethod
    def source(cls, name: str = "seal") -> str:
        """file:line of a function of the class."""
        function = getattr(cls, name)
        try:
            return f"{Path(inspect.getsourcefile(function) or '?').name}:{inspect.getsourcelines(function)[1]}"
        except (OSError, TypeError):
            return cls.__name__


_TRUE, _FALSE = ("true", "1", "on", "yes"), ("false", "0", "off", "no")


#: what the laboratory calls or reads in a class, besides its options
_HOOKS = ("seal", "scores", "fit", "table_bytes", "wants_queries", "n_observed", "fit_tokens")


def check_class(cls: type[Method]) -> None:
    """MethodError for what would be ignored in silence: no seal, names that are nearly those of the laboratory."""
    if cls.seal is Method.seal:
        raise MethodError(f"{cls.__name__} has no seal(page); write def seal(self, page), which gives Decoded back")
    own = [name for c in cls.__mro__[: cls.__mro__.index(Method)] for name in vars(c) if not name.startswith("_")]
    for name in own:
        near = difflib.get_close_matches(name, _HOOKS, 1, 0.85) if name not in vars(Method) else []
        if near:
            raise MethodError(
                f"{cls.__name__}.{name} is no name of the laboratory; did you mean {near[0]}? Else choose another name"
            )
    if not isinstance(cls.n_observed, int) or cls.n_observed < 1:
        raise MethodError(
            f"{cls.__name__}: n_observed={cls.n_observed!r} is no number of query tokens; write 1 or more"
        )


def check(method: Method) -> None:
    """check_class(), and `keep`; MethodError."""
    name = type(method).__name__
    check_class(type(method))
    if not 0 <= method.keep <= 1:
        raise MethodError(f"{name}: keep={method.keep} is not within 0..1")
    if method.keep < 1 and not method.evicts:
        raise MethodError(f"{name}: keep={method.keep} needs scores(cells), which says what stays; write it")
    check_tables(method)


def check_tables(method: Method) -> None:
    """MethodError when table_bytes is no number of bytes."""
    n = method.table_bytes
    if isinstance(n, bool) or not isinstance(n, numbers.Real) or not 0 <= n < 1 << 50:
        raise MethodError(f"{type(method).__name__}: table_bytes={n!r:.60} is no number of bytes; give 0 or more")


def with_options(cls: type[Method], opts: Mapping[str, Any]) -> Method:
    """An object of the class with options as texts or values; MethodError names the option and what it takes."""
    check_class(cls)
    known = {f.name: f.default for f in fields(cls) if f.init}
    values: dict[str, Any] = {}
    for key, value in opts.items():
        if key not in known:
            plain = f"; {key} has no type, write {key}: int = ..." if hasattr(cls, key) else ""
            raise MethodError(f"{cls.__name__} has no option {key!r}: it has {', '.join(known)}{plain}")
        kind: Any = type(known[key])
        text = str(value).strip()
        try:
            if kind is bool and text.lower() in (*_TRUE, *_FALSE):
                values[key] = text.lower() in _TRUE
            elif kind is bool:
                raise ValueError
            else:
                values[key] = kind(text)
        except ValueError:
            raise MethodError(
                f"{cls.__name__}: {key}={text} is no {kind.__name__}; its default is {known[key]!r}"
            ) from None
    try:
        out = cls(**values)
    except Exception as e:
        raise MethodError(f"{cls.__name__} cannot be made: {type(e).__name__}: {e}") from e
    check(out)
    return out


def sources(path: Path) -> list[Path]:
    """The file, and the files of its folder that it imports, and so on."""
    found, left = [], [path.resolve()]
    while left:
        file = left.pop()
        if file in found or not file.is_file():
            continue
        found.append(file)
        try:
            nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        except (SyntaxError, ValueError):
            continue
        for node in nodes:
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            left += [path.resolve().parent / f"{name.partition('.')[0]}.py" for name in names]
    return sorted(found)


def _module_name(path: Path) -> str:
    return f"ggml_kvq_lab_{path.stem}_{abs(hash(str(path.resolve()))):x}"


def classes(path: Path) -> dict[str, type[Method]]:
    """Methods that a Python file defines. MethodError when it does not run."""
    if not path.is_file():
        raise MethodError(f"{path} is not a file; give lab:FILE.py:CLASS, or write one with `ggml-kvq lab new {path}`")
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise MethodError(f"{path} is no Python file; give a file whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.resolve().parent))  # files beside it may be imported
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        here = path.resolve()
        line = next((f.lineno for f in reversed(_frames(e)) if Path(f.filename).resolve() == here), 0)
        what = str(e) if isinstance(e, MethodError) else f"{type(e).__name__}: {getattr(e, 'msg', e)}"
        raise MethodError(f"{path.name}:{line}: {what}") from e
    finally:
        sys.path.remove(str(path.resolve().parent))
    found = {k: v for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, Method)}
    return {k: v for k, v in found.items() if v.__module__ == name}


def _frames(e: BaseException) -> list[Any]:
    import traceback

    frames: list[Any] = list(traceback.extract_tb(e.__traceback__))
    if isinstance(e, SyntaxError) and e.filename:
        frames.append(traceback.FrameSummary(e.filename, e.lineno or 0, "", lookup_line=False))
    return frames


def load(text: str, opts: Mapping[str, Any] | None = None) -> Method:
    """ "file.py:Mine,bits=2" -> Mine(bits=2); the class may be left out where the file has one alone. MethodError."""
    where, *parts = text.split(",")
    given = dict(opts or {})
    for part in parts:
        key, found, value = part.partition("=")
        if not found:
            raise MethodError(f"lab:{text}: option {part!r} has no value; write {part}=VALUE")
        given[key.strip()] = value
    file, _, name = where.partition(":")
    known = classes(Path(file))
    if not name and len(known) == 1:
        name = next(iter(known))
    if name and name not in known and hasattr(sys.modules[_module_name(Path(file))], name):
        raise MethodError(f"{file}: {name} is no ggml_kvq.lab.Method; write class {name}(Method)")
    if name not in known:
        what = f"no class {name!r}" if name else "several classes" if known else "no class"
        raise MethodError(
            f"{file} has {what}; write lab:{file}:CLASS, one of {', '.join(known) or 'those derived from Method'}"
        )
    return with_options(known[name], given)
