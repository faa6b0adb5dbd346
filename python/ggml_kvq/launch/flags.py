"""Reading a llama.cpp command line: our own flags are taken out of it, the user's choices for upstream are looked up
in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import KvqError

OURS = {
    "--kv-method": "NAME",
    "--kv-bits": "N",
    "--kv-budget": "SIZE",
    "--kv-opt": "KEY=VALUE",
    "--kv-config": "FILE.gguf",
    "--kv-method-draft": "NAME",
    "--kv-opt-draft": "KEY=VALUE",
    "--kv-stats-file": "FILE.json",
}
OURS_RPC_SERVER = {**OURS, "--kv-model": "FILE.gguf"}
PREFIX = "--kv-"
THEIRS = ("--kv-unified", "--kv-unified-per-slot", "--kv-offload")  # llama.cpp's own that begin alike
# Options whose value is free text and may look like an option. llama-bench's -p takes a number; skipping it does no
# harm.
TEXT = {
    "-p",
    "--prompt",
    "-sys",
    "--system-prompt",
    "-r",
    "--reverse-prompt",
    "--in-prefix",
    "--in-suffix",
    "--grammar",
}
FALSE = {"off", "disabled", "false", "0"}
TRUE = {"on", "enabled", "true", "1"}


class LaunchError(KvqError):
    """A refused command line: one line that names the value and the cure."""


@dataclass
class Flags:
    """Our flags, as given (None: absent), and the other arguments in `rest`."""

    method: str | None = None
    bits: str | None = None
    budget: str | None = None
    config: str | None = None
    model: str | None = None
    stats_file: str | None = None
    opts: list[str] = field(default_factory=list)
    implied: list[str] = field(default_factory=list)  # options that other flags come to
    draft_method: str | None = None
    draft_opts: list[str] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)


def long_name(arg: str) -> str:
    """llama.cpp reads --kv_method as --kv-method; so do we."""
    return arg.replace("_", "-") if arg.startswith("--") else arg


def _meant(name: str, ours: Mapping[str, str]) -> str | None:
    """The flag of `ours` that an unknown --kv-... is close to; None: llama.cpp judges it, which may have new ones."""
    if not name.startswith(PREFIX) or name in ours:
        return None
    import difflib

    known = {flag.removeprefix(PREFIX): flag for flag in (*ours, *THEIRS)}
    near = difflib.get_close_matches(name.removeprefix(PREFIX), known, 1, 0.75)
    return known[near[0]] if near and known[near[0]] in ours else None


def take_ours(argv: Sequence[str], ours: Mapping[str, str] = OURS) -> Flags:
    """Flags of `ours` taken out of argv. LaunchError for one without a value, or misspelt."""
    flags, i = Flags(), 0
    while i < len(argv):
        arg = argv[i]
        head, eq, tail = arg.partition("=")
        name = long_name(head)
        if meant := _meant(name, ours):
            raise LaunchError(f"{head} is unknown: write {meant} {ours[meant]}")
        if name not in ours:
            flags.rest.append(arg)
            if arg in TEXT and i + 1 < len(argv):
                i += 1
                flags.rest.append(argv[i])
            i += 1
            continue
        if not eq:
            i += 1
            if i >= len(argv):
                raise LaunchError(f"{name} has no value: write {name} {ours[name]}")
            tail = argv[i]
        if not tail.strip() and name not in ("--kv-method", "--kv-opt", "--kv-opt-draft"):  # refused in words of theirs
            raise LaunchError(f"{name} has an empty value: write {name} {ours[name]}, or drop it")
        if name == "--kv-method":
            flags.method = tail
        elif name == "--kv-bits":
            flags.bits = tail
        elif name == "--kv-budget":
            flags.budget = tail
        elif name == "--kv-config":
            flags.config = tail
        elif name == "--kv-model":
            flags.model = tail
        elif name == "--kv-stats-file":
            flags.stats_file = tail
        elif name == "--kv-method-draft":
            flags.draft_method = tail
        else:
            key, eq, value = tail.partition("=")
            if not key.strip() or not eq or not value.strip():
                raise LaunchError(f"{name} {tail!r} is not KEY=VALUE; write for example {name} group=64")
            (flags.opts if name == "--kv-opt" else flags.draft_opts).append(tail)
        i += 1
    return flags


class User:
    """What the user chose for upstream, from the arguments and (not in llama-bench, which reads none) LLAMA_ARG_*
    variables.
    """

    def __init__(self, args: Sequence[str], environ: Mapping[str, str], reads_env: bool) -> None:
        self.args, self.environ, self.reads_env = args, environ, reads_env

    def values(self, names: Sequence[str], env: str | None = None) -> list[str]:
        """Values given to an option, in order; the variable's when the option is absent."""
        out, i = [], 0
        while i < len(self.args):
            arg = self.args[i]
            if long_name(arg) in names and i + 1 < len(self.args):
                out.append(self.args[i + 1])
                i += 1
            elif arg in TEXT:
                i += 1
            i += 1
        if not out and env and self.reads_env and env in self.environ:
            out.append(self.environ[env])
        return out

    def last(self, names: Sequence[str], env: str | None = None) -> str:
        """The value that counts, "" when none was given."""
        return (self.values(names, env) or [""])[-1]

    def has(self, names: Sequence[str]) -> bool:
        """Does an argument bear one of these names? Values of free text do not count."""
        i = 0
        while i < len(self.args):
            if long_name(self.args[i]) in names:
                return True
            i += 2 if self.args[i] in TEXT else 1
        return False

    def last_name(self, names: Sequence[str]) -> str:
        """The last argument that bears one of these names, "" when none does: of switches that llama.cpp has twice."""
        out, i = "", 0
        while i < len(self.args):
            name = long_name(self.args[i])
            out = name if name in names else out
            i += 2 if self.args[i] in TEXT else 1
        return out

    def models(self, bench: bool) -> list[str]:
        """Model files: the last one given, in llama-bench all."""
        values = self.values(("-m", "--model"), "LLAMA_ARG_MODEL")
        if bench:
            return [path for value in values for path in value.split(",") if path]
        return values[-1:]


def without(args: Sequence[str], names: Sequence[str], n_values: int = 1) -> tuple[list[str], list[str]]:
    """(the options `names` with their values, the other arguments)."""
    taken: list[str] = []
    rest: list[str] = []
    i = 0
    while i < len(args):
        if long_name(args[i]) in names and i + n_values < len(args):
            taken += args[i : i + 1 + n_values]
            i += n_values
        else:
            rest.append(args[i])
            if args[i] in TEXT and i + 1 < len(args):
                i += 1
                rest.append(args[i])
        i += 1
    return taken, rest


_SIZED = {
    "-c",
    "--ctx-size",
    "-b",
    "--batch-size",
    "-ub",
    "--ubatch-size",
    "-n",
    "--predict",
    "--n-predict",
    "--keep",
    "-fitc",
    "--fit-ctx",
}
_SIZED_BENCH = {
    "-p",
    "--n-prompt",
    "-n",
    "--n-gen",
    "-d",
    "--n-depth",
    "-b",
    "--batch-size",
    "-ub",
    "--ubatch-size",
    "-pg",
}


def spell_sizes(args: Sequence[str], bench: bool) -> list[str]:
    """The arguments with sizes like 32k written out where llama.cpp takes a number of tokens: it would read 32."""
    from ..memory import tokens

    def spell(part: str) -> str:
        return str(tokens(part)) if re.fullmatch(r"\d+(\.\d+)?[kKmM]", part) else part

    out, sized = list(args), _SIZED_BENCH if bench else _SIZED
    i = 0
    while i + 1 < len(out):
        if long_name(out[i]) in sized:
            try:
                out[i + 1] = ",".join(spell(part) for part in out[i + 1].split(","))
            except ValueError:
                raise LaunchError(
                    f"{out[i]} {out[i + 1]} is no number of tokens; write for example {out[i]} 32k"
                ) from None
            i += 1
        elif out[i] in TEXT:
            i += 1
        i += 1
    return out
