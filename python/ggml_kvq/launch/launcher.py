"""llama-cli, llama-completion, llama-server, llama-bench, llama-perplexity: upstream's programs with a few more flags.

A launcher takes --kv-method and the flags like it away, sets the environment that libggml-kvq.so reads, adds the
device and flash attention unless the user chose them, and execs the unmodified program: no Python stays behind.
Without a method nothing is changed.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .. import _paths, budget, cpu_layers, declared, default_means, files, gguf_header, memory, progress, resolver
from ..core import llama
from ..errors import BudgetError, KvqError, MethodError
from . import hub_args, offload, refusals, router, served_page
from .flags import OURS, OURS_RPC_SERVER, Flags, LaunchError, User, spell_sizes, take_ours, without
from .refusals import DEVICE

HELP = """\
----- ggml-kvq options -----

--kv-method NAME        keep the KV cache in the form of NAME (`ggml-kvq methods` lists them);
                        default: the method named in the model's metadata, else llama.cpp's own cache
                        (env: KVQ_METHOD)
                        none: llama.cpp's own cache, whatever the model or the environment names
--kv-bits N             method auto with N true bits, as 2.5. They count at 131072 tokens, everything included.
                        A shorter context has the same codes; its f16 window takes more bits, which the load line states
--kv-budget SIZE        method auto in SIZE bytes of cache, as 2G or 800M: the most bits at -c N, and without -c the
                        model's context, or the longest that still has --kv-bits (default 2.5)
--kv-opt KEY=VALUE      option of the method, repeatable (`ggml-kvq methods NAME` lists keys) (env: KVQ_OPTS)
                        declare=TYPE is of every method: what llama.cpp declares the cache as (-ctk, -ctv), f16 or
                        smaller. States have rows of that size. auto: the smallest, as llama-server has by itself
--kv-config FILE.gguf   calibrated data; default: the model's own, else MODEL.kvq.gguf beside MODEL.gguf, when they are
                        of the chosen method; none: not the file beside the model (env: KVQ_CONFIG)
--kv-method-draft NAME  for the cache of a draft model (-md) or of multi-token prediction; default: llama.cpp's own
                        f16 cache, because a draft that reads a quantised cache is accepted less often
                        (env: KVQ_METHOD_DRAFT)
--kv-opt-draft KEY=VALUE  option of that method, repeatable (env: KVQ_OPTS_DRAFT)
--kv-stats-file FILE.json  what the cache holds (method, bits, bytes, sealed pages, layers), rewritten every two seconds
                        (env: KVQ_STATS_FILE)

"""

HELP_RPC_SERVER = """\
--kv-model FILE.gguf    the model that clients run, for methods that count its layers or take data from it;
                        only its header is read (env: KVQ_MODEL)

"""

RPC_SERVER = "ggml-rpc-server"  # upstream's name; our launcher is llama-rpc-server
DRAFT_DEVICE = "KVQD0"  # the library has it when KVQ_METHOD_DRAFT is set
_SHARES_CACHE = (
    "gemma4-assistant",
)  # drafts that read the keys and values of their target, on the device that holds them
_CONNECT_S, _LIST_S = 10, 120  # seconds until an RPC server must accept, and until it must have named its devices


@dataclass
class Command:
    """What will be executed: arguments (without argv[0]), environment changes (None removes), notes for stderr.

    remote: it talks to other machines. Upstream sends to a closed connection without asking for an error, so the signal
    would end the program without a word, and a server with its client.
    """

    args: list[str]
    remote: bool = False
    env: dict[str, str | None] = field(default_factory=dict)
    page: Path | None = None  # to serve with the cache's figures beside it
    notes: list[str] = field(default_factory=list)


def _rpc_servers(user: User) -> list[str]:
    """host:port of every server named by --rpc. LaunchError when one is not of that form or accepts no connection."""
    values = user.values(("--rpc", "-rpc"), "LLAMA_ARG_RPC")
    servers = [server for value in values for server in value.split(",") if server]
    for server in servers:
        host, _, port = server.partition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise LaunchError(f"--rpc {server} is not HOST:PORT; write for example --rpc 192.168.1.2:50052")
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        except OSError as e:
            why = e.strerror or str(e)
            cure = "start llama-rpc-server there, or drop it from --rpc"
            raise LaunchError(f"no RPC server answers at {server} ({why}): {cure}") from e
    return servers


def _rpc_devices(path: Path, servers: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """The RPC servers' devices as the program names them (RPC0, RPC1, ...): it alone knows how many each server has."""
    names = ",".join(servers)
    argv = [str(path), "--rpc", names, "--list-devices"]
    try:
        done = subprocess.run(argv, env=dict(env), capture_output=True, text=True, timeout=_LIST_S, check=False)
    except subprocess.TimeoutExpired:
        why = "an RPC server serves one client at a time"
        raise LaunchError(f"{names} named no devices in {_LIST_S} s: {why}") from None
    devices = re.findall(r"^\s+(RPC\w*): ", done.stdout, re.MULTILINE)
    if done.returncode or not devices:
        lines = [line.strip() for line in done.stderr.splitlines() if "RPC" in line or "onnect" in line]
        why = lines[0] if lines else f"exit code {done.returncode}"
        raise LaunchError(f"{names} offers no devices ({why}): use an RPC server of the same llama.cpp")
    return devices


def _cuda_devices() -> list[str]:
    """Names of the devices that draft models use without us: [] on a build without CUDA."""
    return ["CUDA0"] if list(_paths.lib_dir().glob("libggml-cuda.so*")) else []


def _draft(user: User, flags: Flags, environ: Mapping[str, str], out: Command) -> list[str]:
    """Arguments that put a draft model's cache where it belongs; environment of its method into out.env.
    LaunchError on a bad method.
    """
    from .. import methods
    from ..core import native

    by_env, env_opts = environ.get("KVQ_METHOD_DRAFT") or None, environ.get("KVQ_OPTS_DRAFT") or ""
    method = flags.draft_method or by_env
    words = f"--kv-method-draft {method}" if flags.draft_method else f"KVQ_METHOD_DRAFT={method}"
    model = (user.values(("-md", "--model-draft", "--spec-draft-model"), "LLAMA_ARG_SPEC_DRAFT_MODEL") or [""])[-1]
    present = (
        model
        or user.has(("-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf"))
        or "LLAMA_ARG_SPEC_DRAFT_HF_REPO" in environ
    )
    predicts = any("mtp" in value for value in user.values(("--spec-type",), "LLAMA_ARG_SPEC_TYPE"))
    arch = gguf_header.read(model).fields.get("general.architecture") if os.path.isfile(model) else None
    if by_env and not flags.draft_method and not present and not predicts:  # exported once, for many programs
        out.notes.append(f"{words} is not used: there is no draft; add -md FILE.gguf or --spec-type draft-mtp")
        out.env |= {"KVQ_METHOD_DRAFT": None, "KVQ_OPTS_DRAFT": None}
        method = None
    elif env_opts and (not method or (by_env and by_env != method)):
        why = f"they are for {by_env}" if by_env else "no method of the draft is chosen; add --kv-method-draft NAME"
        out.notes.append(f"KVQ_OPTS_DRAFT={env_opts} is not used: {why}")
        env_opts = ""
    if method:
        if arch in _SHARES_CACHE:
            cure = "drop the flag" if flags.draft_method else "unset the variable"
            raise LaunchError(f"{words}: {model} ({arch}) has no cache of its own, it reads the model's; {cure}")
        if not present and not predicts:
            raise LaunchError(f"{words} needs a draft: add -md FILE.gguf or --spec-type draft-mtp, or drop it")
        try:
            opts = native.merge_options("--kv-opt-draft", env_opts, ",".join(flags.draft_opts))
            methods.check(method, opts)
        except KvqError as e:
            raise LaunchError(f"{words}: {e}") from e
        out.env |= {"KVQ_METHOD_DRAFT": method, "KVQ_OPTS_DRAFT": opts or None, "KVQ_MODEL_DRAFT": model or None}
    elif flags.draft_opts:
        raise LaunchError(f"--kv-opt-draft {flags.draft_opts[0]} needs a method; add --kv-method-draft NAME")
    if not present or user.values(("-devd", "--device-draft", "--spec-draft-device")):
        return []
    if arch in _SHARES_CACHE:
        return []  # as its target's
    return ["-devd", DRAFT_DEVICE if method else ",".join(_cuda_devices()) or "none"]


def _without_method(
    program: str,
    user: User,
    flags: Flags,
    environ: Mapping[str, str],
    *,
    off: bool,
    remote: bool,
    env: dict[str, str | None],
) -> Command:
    """llama.cpp's own cache. off: it was asked for by name; else options of a method that nobody names are refused."""
    if flags.opts:
        raise LaunchError(
            f"--kv-opt {flags.opts[0]} needs a method; add --kv-method NAME (`ggml-kvq methods` lists them)"
        )
    if flags.draft_method or flags.draft_opts:
        raise LaunchError(
            "--kv-method-draft needs a method of the model too; add --kv-method NAME (f16 keeps its cache exact)"
        )
    if flags.stats_file:
        raise LaunchError(
            f"--kv-stats-file {flags.stats_file} needs a method; add --kv-method NAME (`ggml-kvq methods` lists them)"
        )
    page = served_page.wanted(program, user)
    out = Command([*(["--path", str(page)] if page else []), *flags.rest], remote=remote, env=env)
    out.notes += [
        f"{name}={environ[name]} is not used: no method is chosen; add --kv-method NAME"
        for name in ("KVQ_OPTS", "KVQ_METHOD_DRAFT", "KVQ_STATS_FILE")
        if environ.get(name) and not off
    ]
    if off:  # llama-bench would load the library and take its device
        out.env |= dict.fromkeys(
            k for k in ("KVQ_METHOD", "KVQ_OPTS", "KVQ_CONFIG", "KVQ_METHOD_DRAFT") if k in environ
        )
        out.env |= {"GGML_BACKEND_PATH": None} if _is_ours(environ.get("GGML_BACKEND_PATH")) else {}
    return out


@dataclass(frozen=True)
class _Number:
    """--kv-bits or --kv-budget as an option of method auto; what else changes."""

    option: str
    args: list[str]
    notes: list[str] = field(default_factory=list)


def _one_number(program: str, user: User, flags: Flags, model: str, opts: str) -> _Number:
    """What the number comes to with these options of method auto (those of calibrated data among them). LaunchError for
    one that cannot be met.
    """
    named = [opt for opt in flags.opts if opt.replace(" ", "").startswith("bits=")]
    number = f"--kv-budget {flags.budget}" if flags.budget else f"--kv-bits {flags.bits}"
    if named and (flags.budget or named[-1].partition("=")[2].strip() != flags.bits):
        raise LaunchError(f"{number} and --kv-opt {named[-1]} both say how many bits: drop one")
    try:
        bits = budget.bits(flags.bits, "--kv-bits") if flags.bits else None
        facts = memory.model(model) if os.path.isfile(model) else None
        if not flags.budget:
            if facts and bits:
                asked = f"--kv-bits {bits:g}"
                with_bits = ",".join(filter(None, (opts, f"bits={bits:g}")))
                budget.refuse_bits_below_least(facts, with_bits, asked, "write --kv-opt pairs=none")
            top = budget.beyond(facts, opts, bits) if facts and bits else 0.0
            end = f"auto ends at {top:.2g} bits; for more: --kv-method kivi --kv-opt bits=4, or --kv-method f16"
            return _Number(f"bits={bits:g}", flags.rest, [end] if top else [])
        room = budget.size(flags.budget, "--kv-budget")
        if program == "llama-bench" or facts is None:
            raise LaunchError(f"--kv-budget {flags.budget} needs one model and one context: write --kv-bits here")
        facts = refusals.with_whole_windows(facts, user)
        want = refusals.context(program, user)
        fit = budget.fit(facts, room, want, opts, bits or budget.USUAL_BITS, bits or 16.0)
    except BudgetError as e:
        raise LaunchError(str(e) if "--kv-" in str(e) else f"--kv-budget {flags.budget}: {e}") from e
    chosen = ["-c", str(fit.n_ctx)] if fit.n_ctx else []
    _, rest = without(flags.rest, ("-c", "--ctx-size")) if chosen else ([], flags.rest)
    exact = budget.exact(facts, want, fit)
    more = [f"--kv-budget {flags.budget} holds an exact cache too, of {budget.words(exact)}: --kv-method f16"]
    return _Number(
        fit.option, [*chosen, *rest], [f"--kv-budget: {fit.note}", *(more if exact <= room and not bits else [])]
    )


def _resolved(flags: Flags, environ: Mapping[str, str], header: gguf_header.Header | None) -> resolver.Resolved:
    """Method, options and calibrated data of our flags, the variables and the model. LaunchError."""
    from .. import methods

    number = f"--kv-bits {flags.bits}" if flags.bits else f"--kv-budget {flags.budget}" if flags.budget else ""
    asked = resolver.Request(
        resolver.BY_FLAGS,
        flags.method,
        ",".join([*flags.opts, *flags.implied]),
        flags.config,
        number=number,
        env=environ,
    )
    try:
        return resolver.resolve(methods.library, asked, header)
    except MethodError as e:
        unknown, kind = "unknown method" in str(e), flags.method or ""
        if unknown and kind in llama.GGML_TYPES:
            raise LaunchError(
                f"--kv-method {kind} is a type of llama.cpp's own cache: drop it and write -ctk {kind} -ctv {kind}"
            ) from None
        off = f" or {refusals.OFF}" if unknown else ""  # which is no method of the library
        raise LaunchError(f"{e}{off}") from e


def _data(
    program: str,
    user: User,
    flags: Flags,
    environ: Mapping[str, str],
    models: Sequence[str],
    chosen: resolver.Resolved,
) -> tuple[str | None, list[str]]:
    """(KVQ_CONFIG of the program, notes): the file of calibrated data, or the means of this package, measured here. Of
    several models, and of those that a router loads later, the library finds each one's own.
    """
    if (flags.config or environ.get("KVQ_CONFIG")) == resolver.OFF:
        return resolver.OFF, []
    one = models[0] if len(models) == 1 else ""
    if chosen.config_from == "sidecar":
        return (chosen.file, [f"data of {chosen.file}, which lies beside the model"]) if one else (None, [])
    measured = chosen.wants_means or chosen.config_from == resolver.MEASURED
    if not measured or program == RPC_SERVER:
        return chosen.file, []
    known = [m for m in [*models, *([] if models else router.models(user))] if os.path.isfile(m)]
    threads = user.last(("-t", "--threads"), "LLAMA_ARG_THREADS")
    n_threads = int(threads) if threads.isdigit() and int(threads) > 0 else None
    config, notes = None, []
    for model in dict.fromkeys(known):
        if not one and _has_data_beside(model):
            continue
        line = progress.Line()
        config, why = default_means.ensure(
            model,
            lambda text: print(f"{program}: {text}", file=sys.stderr),
            n_threads,
            line,
            kind=chosen.first_use,
            insist=chosen.insists,
        )
        line.clear()
        if why and chosen.insists:
            raise LaunchError(f"{default_means.asked(chosen.first_use)} {why}")
        notes += [f"no means are taken off keys and values of {os.path.basename(model)}: {why}"] if why else []
    return (config or resolver.OFF if notes else config) if one else None, notes


def _has_data_beside(model: str) -> bool:
    return os.path.isfile(f"{os.path.splitext(model)[0]}.kvq.gguf")


def _placement(
    program: str, user: User, flags: Flags, environ: Mapping[str, str], servers: list[str], out: Command
) -> list[str]:
    """Flags that give the cache to our device where the user has not placed it: -dev, -fa on, a projector elsewhere."""
    bench = program == "llama-bench"
    added: list[str] = []
    if servers:
        how = f"llama-rpc-server --kv-method {out.env['KVQ_METHOD']}"
        out.notes.append(f"layers on {','.join(servers)} are cached as their servers were started ({how})")
    if not user.values(("-dev", "--device"), "LLAMA_ARG_DEVICE"):
        names = [DEVICE]
        if "tensor" in user.values(("-sm", "--split-mode"), "LLAMA_ARG_SPLIT_MODE"):
            out.notes.append(
                f"-sm tensor splits over the devices of -dev, and {DEVICE} alone is named: write -dev KVQ0,KVQ1"
            )
        if servers:
            names = [*_rpc_devices(_paths.program(program), servers, _environment(environ, out)), DEVICE]
            rpc, flags.rest = without(flags.rest, ("--rpc", "-rpc"))
            added += rpc
        added += ["-dev", ("/" if bench else ",").join(names)]
        # a multimodal projector follows -dev unless told otherwise, and KVQ0 holds no weights
        placed = user.has(("-mmdev", "--mmproj-device", "--mmproj-offload", "--no-mmproj-offload"))
        present = user.has(("-mm", "--mmproj", "-mmu", "--mmproj-url")) or "LLAMA_ARG_MMPROJ" in environ
        if program in ("llama-server", "llama-cli") and present and not placed:
            added.append("--no-mmproj-offload")
    if not user.values(("-fa", "--flash-attn"), "LLAMA_ARG_FLASH_ATTN"):
        added += ["-fa", "on"]
    return added


def _declared(
    program: str, user: User, asked: str, header: gguf_header.Header | None, chosen: resolver.Resolved, *, remote: bool
) -> list[str]:
    """-ctk and -ctv, as --kv-opt declare= says or by themselves. A server puts away more prompts in a smaller type.
    Other programs keep f16, whose states every method reads. So does a server that may leave layers to llama.cpp (-ngl,
    or --fit on a GPU), whose own cache would take the type at its word.
    """
    given = user.values(("-ctk", "--cache-type-k"), "LLAMA_ARG_CACHE_TYPE_K")
    given += user.values(("-ctv", "--cache-type-v"), "LLAMA_ARG_CACHE_TYPE_V")
    if given:
        if asked:
            raise LaunchError(f"--kv-opt declare={asked} and -ctk or -ctv {given[0]} both name a type: drop one")
        return []
    leaves = remote or user.has(("-ngl", "--gpu-layers", "--n-gpu-layers", "-ot", "--override-tensor"))
    leaves = leaves or "LLAMA_ARG_N_GPU_LAYERS" in user.environ or refusals.on_gpu()
    kind = asked or (declared.AUTO if program == "llama-server" and not leaves else "f16")
    k, v = kind, kind
    if kind == declared.AUTO:
        k, v = declared.smallest(header, chosen.method, chosen.opts, chosen.file) if header else declared.F16
    return [] if (k, v) == declared.F16 else ["-ctk", k, "-ctv", v]


def command(program: str, argv: Sequence[str], environ: Mapping[str, str]) -> Command:
    """Arguments and environment for `program` (such as "llama-cli") given the user's argv (without argv[0]) and
    environment.

    What holds where flags, variables and files differ, libggml-kvq decides (resolver.py). Raises KvqError; reads at
    most the headers of the GGUF files named. With --rpc it connects to the servers and asks for their devices; a model
    on the hub is downloaded.
    """
    bench, serves = program == "llama-bench", program == RPC_SERVER
    flags = take_ours(argv, OURS_RPC_SERVER if serves else OURS)
    declare, flags.opts = declared.take(flags.opts)
    hub_env: dict[str, str | None] = {}
    if not serves:
        flags.rest, hub_env = hub_args.resolve(program, spell_sizes(flags.rest, bench), environ)
    user = User(flags.rest, environ, reads_env=not bench and not serves)
    router.refuse_ours(user)
    given = flags.model or environ.get("KVQ_MODEL")
    models = ([given] if given else []) if serves else user.models(bench)
    servers = [] if serves else _rpc_servers(user)
    if flags.model and not os.path.isfile(flags.model):
        raise LaunchError(f"--kv-model {flags.model} is not a file; give the GGUF that clients run, or its first part")
    header = _header(user, models, serves)
    named = flags.config or environ.get("KVQ_CONFIG") or ""
    if os.path.isfile(named):
        gguf_header.read(named, wanted=gguf_header.SIDECAR)  # in its words when it is no GGUF
    chosen = _resolved(flags, environ, header)
    if chosen.method in ("", refusals.OFF):
        return _without_method(
            program, user, flags, environ, off=chosen.method != "", remote=serves or bool(servers), env=hub_env
        )

    host_env: dict[str, str | None] = {}  # variables whose meaning stands in the arguments instead

    def reread() -> User:
        return User(flags.rest, {k: v for k, v in environ.items() if k not in host_env}, not bench and not serves)

    if not bench and not serves and refusals.on_host(user, bench) and refusals.may_lie_on_host(chosen):
        flags.opts.append("place=host")  # what -nkvo asks for, in the library's words
        _, flags.rest = without(flags.rest, (*refusals.NKVO, *refusals.KVO), 0)
        host_env = dict.fromkeys(("LLAMA_ARG_KV_OFFLOAD", "LLAMA_ARG_NO_KV_OFFLOAD"))
        user = reread()
        chosen = _resolved(flags, environ, header)
    notes: list[str] = [chosen.note] if chosen.note else []
    if host_env:
        notes.append("-nkvo is read as --kv-opt place=host: what is not this cache stays on the device")
    counts = flags.bits or flags.budget
    measured = models[-1] if models and not serves else ""
    if counts:  # what cannot be met is refused before anything is measured
        _one_number(program, user, flags, measured, chosen.options)
    choice = refusals.Choice(chosen.method, chosen.method_words, by_flag=chosen.method_from == "flag")
    offloaded: list[str] = []  # flags that leave weights of some layers to the CPU
    if serves:
        devices = user.values(("-d", "--device"))
        if devices and "KVQ" not in ",".join(devices):
            raise LaunchError(
                f"-d {devices[-1]} leaves out the device that holds the cache of {choice.words}: drop -d or write -d"
                f" {DEVICE}"
            )
    else:
        refusals.conflicts(user, choice, bench)
        refusals.without_cache(header, choice)
        n_layer = cpu_layers.n_layer(header.fields) if header else 0
        alone = len(models) == 1 and not servers
        split = offload.of(user, choice, n_layer, bench=bench, alone=alone, opts=chosen.options)
        flags.rest, offloaded, notes = split.rest, split.added, [*notes, *split.notes]
        if split.whole:
            host_env[offload.NGL_ENV], flags.implied = None, split.opts
            user, chosen = reread(), _resolved(flags, environ, header)
    config, more = _data(program, user, flags, environ, models, chosen)
    notes += more
    if counts:
        chosen = _resolved(flags, environ, header)  # with the data that are there now
        number = _one_number(program, user, flags, measured, chosen.options)
        flags.rest = number.args
        notes += number.notes
        flags.opts.append(number.option)
        user = reread()
        chosen = _resolved(flags, environ, header)
    out = Command(flags.rest, remote=serves or bool(servers), notes=notes)

    backend = str(_paths.backend())
    other = environ.get("GGML_BACKEND_PATH")
    if other and not _is_ours(other):
        out.notes.append(f"GGML_BACKEND_PATH={other} is replaced by {backend}; ggml loads one such library")
    out.env = {
        **hub_env,
        **host_env,
        "KVQ_LAUNCHER": program,
        "GGML_BACKEND_PATH": backend,
        "KVQ_METHOD": chosen.method,
        "KVQ_OPTS": chosen.opts or None,
        "KVQ_CONFIG": config,
        **_asked(flags),
    }
    if len(models) == 1:
        out.env["KVQ_MODEL"] = models[0]
    for path, words in ((flags.stats_file, "--kv-stats-file"), (environ.get("KVQ_STATS_FILE"), "KVQ_STATS_FILE")):
        if path:
            read = (*models, named, chosen.file, *user.values(("-md", "--model-draft", "--spec-draft-model")))
            files.keep_inputs(path, words, *read)
            out.env["KVQ_STATS_FILE"] = stats_file(path, words)
            break
    if serves:
        out.args = [*([] if devices else ["-d", DEVICE]), *flags.rest]
        return out
    added = _placement(program, user, flags, environ, servers, out) + offloaded
    added += _draft(user, flags, environ, out)
    added += _declared(program, user, declare, header, chosen, remote=bool(servers))
    if not servers and not refusals.on_gpu():
        fitted, more, replaced = refusals.fit(program, user, choice, models[-1] if models else "", chosen.opts)
        added += fitted
        out.notes += more
        _, flags.rest = without(flags.rest, tuple(replaced)) if replaced else ([], flags.rest)
    elif refusals.place(chosen.opts) == "auto" and not bench and not offloaded:
        # --fit would move layers to the CPU, whose cache is f16, before the library moves blocks there
        added += [] if user.last(("-fit", "--fit"), "LLAMA_ARG_FIT") else ["-fit", "off"]
    # in front: behind a dangling option of the user ("-m" without a file) they would be taken for its value
    out.args = [*added, *flags.rest]
    out.page = served_page.wanted(program, user)
    return out


def _asked(flags: Flags) -> dict[str, str | None]:
    """KVQ_ASKED, words of the load line, where they differ from the options that the library gets."""
    if not flags.budget:
        return {}
    bits = f", --kv-bits {flags.bits}" if flags.bits else ""
    others = "".join(f",{opt}" for opt in flags.opts[:-1])
    return {"KVQ_ASKED": f"--kv-budget {flags.budget}{bits}{others}"}


def _header(user: User, models: Sequence[str], serves: bool) -> gguf_header.Header | None:
    """Header of the last model. LaunchError for one that is not there, GgufError for one that is cut off or no GGUF."""
    header = None
    fetched = (
        user.has(("-mu", "--model-url", "-dr", "--docker-repo"))
        or "LLAMA_ARG_MODEL_URL" in user.environ
        or "LLAMA_ARG_DOCKER_REPO" in user.environ
    )
    for model in models:
        if os.path.isfile(model):
            header = gguf_header.read(model, tensors=not serves)
            if not serves:
                header.check_whole()
        elif not fetched and not serves:
            raise LaunchError(refusals.missing(model))
    return header


def _is_ours(path: str | None) -> bool:
    return bool(path) and os.path.realpath(str(path)) == os.path.realpath(_paths.backend())


def stats_file(path: str, words: str = "--kv-stats-file") -> str:
    """Absolute path of the file of figures. LaunchError when no file can be made there. `words`: what named it."""
    if not path.strip():
        raise LaunchError(f"{words} is blank; give a file in a folder that exists and is yours")
    target = os.path.abspath(path)
    folder = os.path.dirname(target)
    plain = os.path.isfile(target) or not os.path.exists(target)  # a device or a pipe would be replaced by a file
    if not plain or not os.access(folder, os.W_OK | os.X_OK):
        raise LaunchError(f"{words} {path} cannot be written; give a file in a folder that exists and is yours")
    return target


def _environment(environ: Mapping[str, str], cmd: Command) -> dict[str, str]:
    env = dict(environ)
    for key, value in cmd.env.items():
        env.pop(key, None)
        if value is not None:
            env[key] = value
    return env


def run(program: str, argv: Sequence[str], name: str = "") -> int:
    """Replace this process by `program`, which users know as `name`. Returns (an exit code) only when it refuses to."""
    name = name or program
    try:
        path = _paths.program(program)
        if any(arg in ("-h", "--help", "--usage") for arg in argv):
            sys.stdout.write(HELP + (HELP_RPC_SERVER if program == RPC_SERVER else ""))
            sys.stdout.flush()
        cmd = command(program, argv, os.environ)
        for note in cmd.notes:
            print(f"{name}: note: {note}", file=sys.stderr, flush=True)
        if cmd.page:
            folder, stats = served_page.prepare(cmd.page, os.environ)
            cmd.args[:0], cmd.env["KVQ_PAGE_STATS_FILE"] = ["--path", str(folder)], stats
        env = _environment(os.environ, cmd)
        # Python ignores these two from its start on; the program must find them as a shell leaves them.
        for kind in (signal.SIGXFSZ,) if cmd.remote else (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(kind, signal.SIG_DFL)
        os.execve(path, [str(path), *cmd.args], env)
    except KvqError as e:
        print(f"{name}: error: {e}", file=sys.stderr)
    except OSError as e:
        what = f"{e.filename or program}: {e.strerror}; check the file and its permissions"
        print(f"{name}: error: {what}", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return 2


def llama_cli() -> int:
    return run("llama-cli", sys.argv[1:])


def llama_completion() -> int:
    return run("llama-completion", sys.argv[1:])


def llama_server() -> int:
    return run("llama-server", sys.argv[1:])


def llama_bench() -> int:
    return run("llama-bench", sys.argv[1:])


def llama_rpc_server() -> int:
    return run(RPC_SERVER, sys.argv[1:], "llama-rpc-server")


def llama_perplexity() -> int:
    return run("llama-perplexity", sys.argv[1:])
