"""What a launcher refuses, and the context it chooses: choices under which the method would not be used, or the
machine would not last.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from .. import _paths, budget, gguf_header, memory, methods, resolver
from ..core import llama
from ..errors import KvqError
from .flags import FALSE, TRUE, LaunchError, User

DEVICE = "KVQ0"
NKVO, KVO = ("-nkvo", "--no-kv-offload"), ("-kvo", "--kv-offload")
OFF = "none"  # --kv-method none: llama.cpp's own cache, whatever the model or the environment names
_N_CTX = {"llama-perplexity": 512}  # default -c, where it is not the model's own
_MARGIN = 1 << 30  # what stays free when the context is chosen here, bytes; upstream's --fit-target


@dataclass(frozen=True)
class Choice:
    """A method and, for messages, what chose it: "--kv-method kivi", "KVQ_METHOD=kivi", "method kivi of model.gguf's
    metadata".
    """

    method: str
    words: str
    by_flag: bool = True

    @property
    def drop(self) -> str:
        """How to do without it."""
        return f"drop {self.words}" if self.by_flag else f"add --kv-method {OFF}"


def on_host(user: User, bench: bool) -> bool:
    """Does -nkvo keep the cache in llama.cpp's memory of the host? Of twin switches the last one counts."""
    if bench:
        return any(part in TRUE for v in user.values(NKVO) for part in v.split(","))
    env = user.environ
    last = user.last_name((*NKVO, *KVO))
    return last in NKVO if last else env.get("LLAMA_ARG_KV_OFFLOAD") in FALSE or "LLAMA_ARG_NO_KV_OFFLOAD" in env


def place(opts: str) -> str:
    """Value of option place, "" when it is not given."""
    return next((v.strip() for k, _, v in (x.partition("=") for x in opts.split(",")) if k.strip() == "place"), "")


def takes_place(method: str) -> bool:
    """Can sealed blocks of this method lie in the host's memory (option place)?"""
    found = [o for row in methods.table() if row["name"] == method for o in row["options"] if o["key"] == "place"]
    return bool(found) and found[0]["default_value"] == "device"


def may_lie_on_host(chosen: resolver.Resolved) -> bool:
    """Can the library do what -nkvo asks for? Not where the options say otherwise."""
    return takes_place(chosen.method) and place(chosen.opts) in ("", "host")


def conflicts(user: User, choice: Choice, bench: bool) -> None:
    """Refuse choices of the user that would leave the method unused, silently."""
    words, either = choice.words, "drop one of them" if choice.by_flag else f"drop it or add --kv-method {OFF}"
    flash = user.values(("-fa", "--flash-attn"), "LLAMA_ARG_FLASH_ATTN")
    for value in flash if bench else flash[-1:]:
        if any(part in FALSE for part in value.split(",")):
            raise LaunchError(
                f"-fa {value} switches flash attention off, which {words} works through: drop -fa or write -fa on"
            )
    for value in user.values(("-sm", "--split-mode"), "LLAMA_ARG_SPLIT_MODE"):
        if "row" in value.split(","):
            raise LaunchError(
                f"-sm row keeps every cache in llama.cpp's own memory, so {words} would not be used: write -sm layer,"
                f" -sm tensor or {choice.drop}"
            )
    devices = user.values(("-dev", "--device"), "LLAMA_ARG_DEVICE")
    chosen = ",".join(devices if bench else devices[-1:])
    if chosen and all(name.startswith("RPC") for name in chosen.replace("/", ",").split(",")):
        raise LaunchError(
            f"-dev {devices[-1]} leaves every cache to the RPC servers, whose own flags choose its form: {choice.drop}"
            " here"
        )
    if devices and "KVQ" not in chosen:
        raise LaunchError(
            f"-dev {devices[-1]} leaves out the device that holds the cache of {words}: drop -dev or write -dev"
            f" {DEVICE}"
        )
    if on_host(user, bench):
        cure = "write --kv-opt place=host in its place" if bench and takes_place(choice.method) else either
        raise LaunchError(f"-nkvo keeps the KV cache in llama.cpp's own memory, so {words} would not be used: {cure}")
    for side in ("k", "v"):
        for value in user.values((f"-ct{side}", f"--cache-type-{side}"), f"LLAMA_ARG_CACHE_TYPE_{side.upper()}"):
            if not set(value.split(",")) <= set(llama.DECLARED):
                raise LaunchError(
                    f"-ct{side} {value} is no type that a cache of {words} can be declared in"
                    f" ({', '.join(llama.DECLARED)}): {either}"
                )


def without_cache(header: gguf_header.Header | None, choice: Choice) -> None:
    """Refuse a model that reads all its tokens at once and keeps none: nobody would be told that the method is idle."""
    arch = header.fields.get("general.architecture") if header else None
    if header and arch in gguf_header.WITHOUT_CACHE:
        raise LaunchError(
            f"{os.path.basename(header.path)} ({arch}) keeps no KV cache, so {choice.words} would not be used:"
            f" {choice.drop}"
        )


def on_gpu() -> bool:
    """Does KVQ0 stand over a GPU here?"""
    return bool(list(_paths.lib_dir().glob("libggml-cuda.so*"))) and os.path.exists("/dev/nvidiactl")


def _number(text: str, what: str) -> int:
    try:
        return memory.tokens(text)
    except ValueError:
        raise LaunchError(
            f"{what} {text} is no number of tokens; write for example {what} 32768 or {what} 32k"
        ) from None


def context(program: str, user: User) -> budget.Context:
    """What the user's arguments say of the context: tokens (0: nothing), streams, tokens of a ubatch. LaunchError."""
    asked = user.last(("-c", "--ctx-size"), "LLAMA_ARG_CTX_SIZE")
    n_ctx = _number(asked, "-c") if asked and asked[0] in "-0123456789" else _N_CTX.get(program, 0)
    n_batch = _number(user.last(("-b", "--batch-size"), "LLAMA_ARG_BATCH") or "2048", "-b")
    if not n_batch:
        raise LaunchError("-b 0 decodes nothing: drop -b or write a number of tokens")
    n_ubatch = min(n_batch, _number(user.last(("-ub", "--ubatch-size"), "LLAMA_ARG_UBATCH") or "512", "-ub") or n_batch)
    slots = user.last(("-np", "--parallel"), "LLAMA_ARG_N_PARALLEL")
    unified = user.has(("-kvu", "--kv-unified")) or not slots.isdigit()
    return budget.Context(n_ctx, 1 if unified else max(1, int(slots)), n_ubatch)


def with_whole_windows(facts: memory.Model, user: User) -> memory.Model:
    """With --swa-full every layer keeps the whole context."""
    named = user.reads_env and user.environ.get("LLAMA_ARG_SWA_FULL") in TRUE
    return memory.with_whole_windows(facts) if named or user.has(("--swa-full",)) else facts


def fit(
    program: str,
    user: User,
    choice: Choice,
    model: str,
    opts: str,
    available: Callable[[], int] = memory.available,
) -> tuple[list[str], list[str], set[str]]:
    """(arguments to add, notes, options of the user that this replaces) so that all layers stay on KVQ0.

    llama.cpp's own --fit knows one way to save memory: layers leave the device, and their cache stays f16. Here the
    context is held against the compressed size before anything is loaded. LaunchError names what it needs and what
    fits.
    """
    bench = program == "llama-bench"
    margins = user.last(("-fitt", "--fit-target"), None if bench else "LLAMA_ARG_FIT_TARGET")
    if bench:
        if margins:
            raise LaunchError(
                f"-fitt {margins} moves layers off {DEVICE}, where {choice.words} keeps their cache: drop -fitt"
            )
        return [], [], set()
    wanted = user.last(("-fit", "--fit"), "LLAMA_ARG_FIT")
    if wanted in FALSE:
        return [], [], set()
    added, replaced = ["-fit", "off"], {"-fit", "--fit"}
    facts = memory.model(model) if os.path.isfile(model) else None
    if facts is None or not (facts.full or facts.windowed):
        return added, [], replaced
    margin = int(margins.split(",")[0]) * memory.MIB if margins.split(",")[0].isdigit() else None
    asked = user.last(("-c", "--ctx-size"), "LLAMA_ARG_CTX_SIZE")
    want = context(program, user)
    n_ctx, n_stream, n_ubatch = want.n_ctx, want.n_stream, want.n_ubatch
    facts = with_whole_windows(facts, user)
    try:
        plan = memory.planner(choice.method, opts, facts.n_layer)
        size = {"n_stream": n_stream, "n_ubatch": n_ubatch}
        chosen = n_ctx or facts.n_ctx_train * n_stream
        if not chosen:
            return added, [], replaced
        need, free = memory.need(facts, plan, chosen, **size), available()
        room = free - (margin if margin is not None else 0 if n_ctx else _MARGIN)
        if not free or need.total <= room:
            return (added if n_ctx or n_stream == 1 else [*added, "-c", str(chosen)]), [], replaced
        fits = memory.longest(facts, plan, room, **size)
    except KvqError:
        return added, [], replaced  # a shape that the method refuses: the library says so, with the layer
    least = _number(user.last(("-fitc", "--fit-ctx"), "LLAMA_ARG_FIT_CTX") or "4096", "-fitc")
    kept = "" if margin is None else f" less {margin // memory.MIB} MiB of -fitt"
    answer = f"needs {need.words()}, free {free // memory.MIB} MiB{kept}"
    if n_ctx or asked or fits < least:
        cure = (
            f"the longest context is -c {fits}"
            if fits
            else "no context fits: use a smaller model"
            if margin is None
            else "no context fits: lower -fitt"
        )
        what = f"-c {asked}" if n_ctx else f"{'-c 0, ' if asked else ''}the model's context of {chosen} tokens"
        raise LaunchError(f"{what} with {choice.words} {answer}: {cure}")
    note = (
        f"the model's context of {chosen} tokens {answer}: -c {fits} is used, the longest that leaves"
        f" {(free - room) // memory.MIB} MiB"
    )
    return [*added, "-c", str(fits)], [note], replaced


def missing(model: str) -> str:
    """Why `model` cannot be opened, one line with the cure."""
    from .. import named

    if (name := named.near(model)) and not os.path.exists(model):
        return f"-m {model} is no file: write -m {name} for the model of that name, or the path of a GGUF model"
    what = "is a folder" if os.path.isdir(model) else "is no plain file" if os.path.exists(model) else "does not exist"
    return (
        f"-m {model} {what}; give the path of a GGUF model, -m hf:owner/repo/file.gguf or a name that `ggml-kvq fetch`"
        " lists"
    )
