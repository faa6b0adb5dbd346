"""llama-cli, llama-completion, llama-server, llama-bench, llama-perplexity: upstream's programs with a few more flags.

A launcher takes --kv-method and the flags like it away, sets the environment that libggml-kvq.so reads, adds the device and flash
attention unless the user chose them, and execs the unmodified program: no Python stays behind. Without a method nothing is changed.
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

from . import _paths
from .errors import KvqError

HELP = """\
----- ggml-kvq options -----

--kv-method NAME        keep the KV cache in the form of NAME (`ggml-kvq methods` lists them);
                        default: the method named in the model's metadata, else llama.cpp's own cache
                        (env: KVQ_METHOD)
--kv-opt KEY=VALUE      option of the method, repeatable (`ggml-kvq methods NAME` lists keys) (env: KVQ_OPTS)
--kv-config FILE.gguf   calibrated data; default: the model, when it holds kvq.* metadata (env: KVQ_CONFIG)
--kv-method-draft NAME  for the cache of a draft model (-md) or of multi-token prediction; default: llama.cpp's own f16 cache, because
                        a draft that reads a quantised cache is accepted less often (env: KVQ_METHOD_DRAFT)
--kv-opt-draft KEY=VALUE  option of that method, repeatable (env: KVQ_OPTS_DRAFT)

"""

HELP_RPC_SERVER = """\
--kv-model FILE.gguf    the model that clients run, for methods that count its layers or take data from it;
                        only its header is read (env: KVQ_MODEL)

"""

DEVICE = "KVQ0"
RPC_SERVER = "ggml-rpc-server"  # upstream's name; our launcher is llama-rpc-server
DRAFT_DEVICE = "KVQD0"  # the library has it when KVQ_METHOD_DRAFT is set
_OURS = {"--kv-method": "NAME", "--kv-opt": "KEY=VALUE", "--kv-config": "FILE.gguf", "--kv-method-draft": "NAME", "--kv-opt-draft": "KEY=VALUE"}
_SHARES_CACHE = ("gemma4-assistant",)  # drafts that read the keys and values of their target, on the device that holds them
_OURS_RPC_SERVER = {**_OURS, "--kv-model": "FILE.gguf"}
_CONNECT_S, _LIST_S = 10, 120  # seconds until an RPC server must accept, and until it must have named its devices
# Options whose value is free text and may look like an option. llama-bench's -p takes a number; skipping it does no harm.
_TEXT = {"-p", "--prompt", "-sys", "--system-prompt", "-r", "--reverse-prompt", "--in-prefix", "--in-suffix", "--grammar"}
_FALSE = {"off", "disabled", "false", "0"}
_TRUE = {"on", "enabled", "true", "1"}


class LaunchError(KvqError):
    """A refused command line: one line that names the value and the cure."""


@dataclass
class Command:
    """What will be executed: arguments (without argv[0]), environment changes (None removes), notes for stderr.

    remote: it talks to other machines. Upstream sends to a closed connection without asking for an error, so the signal
    would end the program without a word, and a server with its client.
    """

    args: list[str]
    remote: bool = False
    env: dict[str, str | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class _Flags:
    method: str | None = None
    config: str | None = None
    model: str | None = None
    opts: list[str] = field(default_factory=list)
    draft_method: str | None = None
    draft_opts: list[str] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)


def _long(arg: str) -> str:
    """llama.cpp reads --kv_method as --kv-method; so do we."""
    return arg.replace("_", "-") if arg.startswith("--") else arg


def _take_ours(argv: Sequence[str], ours: Mapping[str, str] = _OURS) -> _Flags:
    flags, i = _Flags(), 0
    while i < len(argv):
        arg = argv[i]
        head, eq, tail = arg.partition("=")
        name = _long(head)
        if name not in ours:
            flags.rest.append(arg)
            if arg in _TEXT and i + 1 < len(argv):
                i += 1
                flags.rest.append(argv[i])
            i += 1
            continue
        if not eq:
            i += 1
            if i >= len(argv):
                raise LaunchError(f"{name} has no value: write {name} {ours[name]}")
            tail = argv[i]
        if name == "--kv-method":
            flags.method = tail
        elif name == "--kv-config":
            flags.config = tail
        elif name == "--kv-model":
            flags.model = tail
        elif name == "--kv-method-draft":
            flags.draft_method = tail
        else:
            key, eq, value = tail.partition("=")
            if not key.strip() or not eq or not value.strip():
                raise LaunchError(f"{name} {tail!r} is not KEY=VALUE; write for example {name} group=64")
            (flags.opts if name == "--kv-opt" else flags.draft_opts).append(tail)
        i += 1
    return flags


class _User:
    """What the user chose for upstream, from the arguments and (not in llama-bench, which reads none) LLAMA_ARG_* variables."""

    def __init__(self, args: Sequence[str], environ: Mapping[str, str], reads_env: bool) -> None:
        self.args, self.environ, self.reads_env = args, environ, reads_env

    def values(self, names: Sequence[str], env: str | None = None) -> list[str]:
        """Values given to an option, in order; the variable's when the option is absent."""
        out, i = [], 0
        while i < len(self.args):
            arg = self.args[i]
            if _long(arg) in names and i + 1 < len(self.args):
                out.append(self.args[i + 1])
                i += 1
            elif arg in _TEXT:
                i += 1
            i += 1
        if not out and env and self.reads_env and env in self.environ:
            out.append(self.environ[env])
        return out

    def has(self, names: Sequence[str]) -> bool:
        return any(_long(arg) in names for arg in self.args)


def _models(user: _User, bench: bool) -> list[str]:
    values = user.values(("-m", "--model"), "LLAMA_ARG_MODEL")
    if bench:
        return [path for value in values for path in value.split(",") if path]
    return values[-1:]


def _refuse_conflicts(user: _User, method: str, bench: bool) -> None:
    """Choices of the user that would leave the method unused, silently."""
    flash = user.values(("-fa", "--flash-attn"), "LLAMA_ARG_FLASH_ATTN")
    for value in flash if bench else flash[-1:]:
        if any(part in _FALSE for part in value.split(",")):
            raise LaunchError(f"-fa {value} switches flash attention off, which --kv-method {method} works through: drop -fa or write -fa on")
    devices = user.values(("-dev", "--device"), "LLAMA_ARG_DEVICE")
    chosen = ",".join(devices if bench else devices[-1:])
    if chosen and all(name.startswith("RPC") for name in chosen.replace("/", ",").split(",")):
        raise LaunchError(
            f"-dev {devices[-1]} leaves every cache to the RPC servers, whose own flags choose its form: "
            f"drop --kv-method {method} here"
        )
    if devices and "KVQ" not in chosen:
        raise LaunchError(f"-dev {devices[-1]} leaves out the device that holds the cache of --kv-method {method}: drop -dev or write -dev {DEVICE}")
    if bench:
        kept = any(part in _TRUE for v in user.values(("-nkvo", "--no-kv-offload")) for part in v.split(","))
    else:
        env = user.environ
        kept = user.has(("-nkvo", "--no-kv-offload")) or env.get("LLAMA_ARG_KV_OFFLOAD") in _FALSE or "LLAMA_ARG_NO_KV_OFFLOAD" in env
        kept = kept and not user.has(("-kvo", "--kv-offload"))
    if kept:
        raise LaunchError(f"-nkvo keeps the KV cache in llama.cpp's own memory, so --kv-method {method} would not be used: drop one of them")
    for side in ("k", "v"):
        for value in user.values((f"-ct{side}", f"--cache-type-{side}"), f"LLAMA_ARG_CACHE_TYPE_{side.upper()}"):
            if set(value.split(",")) != {"f16"}:
                raise LaunchError(f"-ct{side} {value} asks llama.cpp to quantise the cache that --kv-method {method} owns: drop one of them")


def _layer_notes(user: _User, method: str, n_layer: int | None, bench: bool) -> list[str]:
    """-ngl decides which layers' caches are offloaded, to KVQ0 here: 0 means none, up to n_layer means only the last ones."""
    notes = []
    values = user.values(("-ngl", "--gpu-layers", "--n-gpu-layers"), "LLAMA_ARG_N_GPU_LAYERS")
    for value in values if bench else values[-1:]:
        for part in value.split(","):
            if not part.lstrip("-").isdigit():
                continue
            n = int(part)
            if n == 0:
                raise LaunchError(f"-ngl {value} leaves the KV cache of every layer to llama.cpp, so --kv-method {method} would not be used: drop -ngl")
            if n_layer and 0 < n <= n_layer:
                notes.append(f"-ngl {n}: {n_layer + 1 - n} of {n_layer} layers keep llama.cpp's own f16 cache; drop -ngl to compress all")
    return notes


def _rpc_servers(user: _User) -> list[str]:
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


def _split_rpc(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """(--rpc SERVERS, the other arguments): devices can be named only behind the servers that have them."""
    rpc: list[str] = []
    rest: list[str] = []
    i = 0
    while i < len(args):
        if args[i] in ("--rpc", "-rpc") and i + 1 < len(args):
            rpc += args[i : i + 2]
            i += 1
        else:
            rest.append(args[i])
            if args[i] in _TEXT and i + 1 < len(args):
                i += 1
                rest.append(args[i])
        i += 1
    return rpc, rest


def _cuda_devices() -> list[str]:
    """Names of the devices that draft models use without us: [] on a build without CUDA."""
    return ["CUDA0"] if list(_paths.lib_dir().glob("libggml-cuda.so*")) else []


def _draft(user: _User, flags: _Flags, environ: Mapping[str, str], out: Command) -> list[str]:
    """Arguments that put a draft model's cache where it belongs; environment of its method into out.env. LaunchError on a bad method."""
    from . import gguf_header, methods

    method = flags.draft_method or environ.get("KVQ_METHOD_DRAFT") or None
    model = (user.values(("-md", "--model-draft", "--spec-draft-model"), "LLAMA_ARG_SPEC_DRAFT_MODEL") or [""])[-1]
    present = model or user.has(("-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf")) or "LLAMA_ARG_SPEC_DRAFT_HF_REPO" in environ
    predicts = any("mtp" in value for value in user.values(("--spec-type",), "LLAMA_ARG_SPEC_TYPE"))
    if method:
        if not present and not predicts:
            raise LaunchError(f"--kv-method-draft {method} needs a draft: add -md FILE.gguf or --spec-type draft-mtp, or drop it")
        opts = ",".join([*filter(None, [environ.get("KVQ_OPTS_DRAFT")]), *flags.draft_opts])
        try:
            methods.check(method, opts)
        except KvqError as e:
            raise LaunchError(f"--kv-method-draft: {e}") from e
        out.env |= {"KVQ_METHOD_DRAFT": method, "KVQ_OPTS_DRAFT": opts or None, "KVQ_MODEL_DRAFT": model or None}
    elif flags.draft_opts:
        raise LaunchError(f"--kv-opt-draft {flags.draft_opts[0]} needs a method; add --kv-method-draft NAME")
    if not present or user.values(("-devd", "--device-draft", "--spec-draft-device")):
        return []
    if os.path.isfile(model) and gguf_header.read(model).fields.get("general.architecture") in _SHARES_CACHE:
        return []  # as its target's
    return ["-devd", DRAFT_DEVICE if method else ",".join(_cuda_devices()) or "none"]


def command(program: str, argv: Sequence[str], environ: Mapping[str, str]) -> Command:
    """Arguments and environment for `program` (such as "llama-cli") given the user's argv (without argv[0]) and environment.

    Precedence of the method: --kv-method, KVQ_METHOD, the file of --kv-config / KVQ_CONFIG, the model's metadata.
    Raises KvqError; reads at most the headers of the GGUF files named. With --rpc it connects to the servers and asks
    for their devices.
    """
    bench, serves = program == "llama-bench", program == RPC_SERVER
    flags = _take_ours(argv, _OURS_RPC_SERVER if serves else _OURS)
    user = _User(flags.rest, environ, reads_env=not bench and not serves)
    given = flags.model or environ.get("KVQ_MODEL")
    models = ([given] if given else []) if serves else _models(user, bench)
    servers = [] if serves else _rpc_servers(user)
    config = flags.config or environ.get("KVQ_CONFIG") or None
    method = flags.method if flags.method is not None else environ.get("KVQ_METHOD") or None

    from . import gguf_header  # mmap, struct: cheap

    named_by, config_fields = "", {}
    if config:
        if not os.path.isfile(config):
            raise LaunchError(f"--kv-config {config} is not a file; give a GGUF written by `ggml-kvq calibrate`")
        config_fields = gguf_header.read(config).kvq()
        if "kvq.method" not in config_fields:
            raise LaunchError(f"--kv-config {config} holds no kvq.* metadata; give a GGUF written by `ggml-kvq calibrate`")
        if method is None:
            method, named_by = str(config_fields["kvq.method"]), config
    header = None
    if flags.model and not os.path.isfile(flags.model):
        raise LaunchError(f"--kv-model {flags.model} is not a file; give the GGUF that clients run, or its first part")
    for model in models:
        if os.path.isfile(model):  # a missing or special file is the program's business
            header = gguf_header.read(model)
            if method is None and "kvq.method" in header.fields:
                method, named_by = str(header.fields["kvq.method"]), model

    opts = list(flags.opts)
    if environ.get("KVQ_OPTS") and environ.get("KVQ_METHOD", method) == method:
        opts.insert(0, environ["KVQ_OPTS"])
    if method is None:
        if flags.opts:
            raise LaunchError(f"--kv-opt {flags.opts[0]} needs a method; add --kv-method NAME (`ggml-kvq methods` lists them)")
        if flags.draft_method or flags.draft_opts:
            raise LaunchError("--kv-method-draft needs a method of the model too; add --kv-method NAME (f16 keeps its cache exact)")
        return Command(flags.rest, remote=serves or bool(servers))

    from . import methods

    joined = ",".join(opts)
    try:
        methods.check(method, joined)
    except KvqError as e:
        raise LaunchError(f"{named_by}: kvq.method: {e}" if named_by else str(e)) from e
    held = config_fields.get("kvq.method", method)
    if held != method:
        raise LaunchError(f"--kv-config {config} holds data for method {held}, not {method}; give another file or --kv-method {held}")
    if serves:
        devices = user.values(("-d", "--device"))
        if devices and "KVQ" not in ",".join(devices):
            raise LaunchError(
                f"-d {devices[-1]} leaves out the device that holds the cache of --kv-method {method}: "
                f"drop -d or write -d {DEVICE}"
            )
    else:
        _refuse_conflicts(user, method, bench)
    n_layer = header.fields.get(f"{header.fields.get('general.architecture')}.block_count") if header else None
    notes = _layer_notes(user, method, n_layer if isinstance(n_layer, int) else None, bench)
    out = Command(flags.rest, remote=serves or bool(servers), notes=notes)

    backend = str(_paths.backend())
    other = environ.get("GGML_BACKEND_PATH")
    if other and os.path.realpath(other) != os.path.realpath(backend):
        out.notes.append(f"GGML_BACKEND_PATH={other} is replaced by {backend}; ggml loads one such library")
    out.env = {"GGML_BACKEND_PATH": backend, "KVQ_METHOD": method, "KVQ_OPTS": joined or None, "KVQ_CONFIG": config}
    if len(models) == 1:
        out.env["KVQ_MODEL"] = models[0]
    if serves:
        out.args = [*([] if devices else ["-d", DEVICE]), *flags.rest]
        return out
    added: list[str] = []
    if servers:
        how = f"llama-rpc-server --kv-method {method}"
        out.notes.append(f"layers on {','.join(servers)} are cached as their servers were started ({how})")
    if not user.values(("-dev", "--device"), "LLAMA_ARG_DEVICE"):
        names = [DEVICE]
        if servers:
            names = [*_rpc_devices(_paths.program(program), servers, _environment(environ, out)), DEVICE]
            rpc, flags.rest = _split_rpc(flags.rest)
            added += rpc
        added += ["-dev", ("/" if bench else ",").join(names)]
        # a multimodal projector follows -dev unless told otherwise, and KVQ0 holds no weights
        placed = user.has(("-mmdev", "--mmproj-device", "--mmproj-offload", "--no-mmproj-offload"))
        present = user.has(("-mm", "--mmproj", "-mmu", "--mmproj-url", "-hf", "-hfr", "--hf-repo")) or "LLAMA_ARG_MMPROJ" in environ
        if program in ("llama-server", "llama-cli") and present and not placed:
            added.append("--no-mmproj-offload")
    if not user.values(("-fa", "--flash-attn"), "LLAMA_ARG_FLASH_ATTN"):
        added += ["-fa", "on"]
    added += _draft(user, flags, environ, out)
    # in front: behind a dangling option of the user ("-m" without a file) they would be taken for its value
    out.args = [*added, *flags.rest]
    return out


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
