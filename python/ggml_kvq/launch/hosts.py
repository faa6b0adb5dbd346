"""`ggml-kvq doctor --program`: does a program with a llama.cpp of its own take our library? Each step runs in a process
of its own: the library loads, its device is offered, and with a model one token comes out of one of our caches.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import _paths
from ..errors import KvqError, LibraryError
from . import plugin

METHOD = "kivi"
SECONDS = 180
_LLAMA_CPP = """
import llama_cpp
sys.path.append(sys.argv[1])
import ggml_kvq
print("llama-cpp-python", llama_cpp.__version__, flush=True)
ggml_kvq.attach(method=sys.argv[2])
if len(sys.argv) > 3:
    llm = llama_cpp.Llama(sys.argv[3], n_gpu_layers=-1, flash_attn=True, n_ctx=256, verbose=False)
    llm("The file", max_tokens=1)
"""
_NODE = """
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import path from "node:path";
const [root, model] = process.argv.slice(2);
const entry = path.join(root, "node-llama-cpp", "dist", "index.js");
const { getLlama, LlamaLogLevel } = await import(pathToFileURL(entry).href);
const llama = await getLlama({ gpu: false, build: "never", skipDownload: true, logLevel: LlamaLogLevel.warn });
const about = createRequire(import.meta.url)(path.join(root, "node-llama-cpp", "package.json"));
console.log("node-llama-cpp", about.version);
if (model) {
    const loaded = await llama.loadModel({ modelPath: model, gpuLayers: "max", defaultContextFlashAttention: true });
    const context = await loaded.createContext({ contextSize: 256, flashAttention: true });
    for await (const token of context.getSequence().evaluate(loaded.tokenize("The file"))) break;
}
await llama.dispose();
"""


@dataclass(frozen=True)
class Finding:
    """One step: did it work, what was looked at, what was found, what to do."""

    good: bool
    what: str
    found: str
    cure: str = ""


def _environment(**more: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KVQ_", "LLAMA_ARG_"))}
    return {**env, "GGML_BACKEND_PATH": str(_paths.backend().resolve()), "KVQ_METHOD": METHOD, **more}


def _run(argv: list[str], **more: str) -> tuple[int, str]:
    """(exit status, all that it printed)"""
    try:
        done = subprocess.run(
            argv,
            env=_environment(**more),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return 1, f"no answer within {SECONDS} seconds"
    except OSError as e:
        return 1, f"{argv[0]} does not start: {e.strerror}"
    return done.returncode, done.stdout + done.stderr


def _ours(text: str) -> str:
    """The line that says what our cache takes, or our error; "": the library was not heard."""
    lines = [line.strip() for line in text.splitlines() if "ggml-kvq: " in line]
    spoken = [line for line in lines if "MiB KV cache" in line or "error" in line]
    return (spoken or lines or [""])[0]


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no word"


def _token(code: int, text: str) -> Finding:
    line = _ours(text)
    if code == 0 and "MiB KV cache" in line:
        return Finding(True, "one token", line)
    if line:
        return Finding(False, "one token", line, "the line tells the cure")
    if code:
        return Finding(False, "one token", f"it ended with status {code}: {_last(text)}", "try the program without us")
    cure = "give its layers to the device KVQ0 (-dev KVQ0, -ngl 99) and turn flash attention on (-fa on)"
    return Finding(False, "one token", "it came, but from llama.cpp's own cache", cure)


def _list_devices(program: Path) -> Finding:
    code, text = _run([str(program), "--list-devices"])
    if re.search(r"\bKVQ0\b", text):
        return Finding(True, "devices", "KVQ0 is offered")
    line = _ours(text)
    if line:
        return Finding(False, "devices", line, "the line tells the cure")
    if code:
        return Finding(False, "devices", f"{_last(text)} (status {code})", "give a program of llama.cpp")
    code, text = _run([str(program), "--list-devices", "-dev", "KVQ0"])
    if re.search(r"\bKVQ0\b", text) and not code:
        return Finding(True, "devices", "KVQ0 is offered where -dev KVQ0 asks for it")
    cure = "it is linked with its backends and loads none: use a build with shared libraries, or our wheel's programs"
    return Finding(False, "devices", "KVQ0 is not offered", cure)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _ask_server(program: Path, model: Path) -> Finding:
    port = _free_port()
    argv = [str(program), "-m", str(model), "-c", "256", "-np", "1", "--port", str(port)]
    argv += ["--host", "127.0.0.1", "-dev", "KVQ0", "-fa", "on", "--no-webui"]
    process = subprocess.Popen(
        argv, env=_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    answered, end = False, time.monotonic() + SECONDS
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion",
        json.dumps({"prompt": "The file", "n_predict": 1}).encode(),
        {"Content-Type": "application/json"},
    )
    while not answered and process.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                answered = reply.status == 200
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    process.terminate()
    try:
        text = process.communicate(timeout=20)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        text = process.communicate()[0]
    return _token(0 if answered else 1, text)


def _of_program(program: Path, model: Path | None) -> Iterator[Finding]:
    _, text = _run([str(program), "--version"])
    said = re.search(r"version: .*", text)
    yield Finding(True, "program", f"{program}, {said.group() if said else 'which tells no version'}")
    devices = _list_devices(program)
    yield devices
    if model is None or not devices.good:
        return
    if program.name.startswith("llama-server"):
        yield _ask_server(program, model)
        return
    common = ["-m", str(model), "-dev", "KVQ0", "-fa", "1", "-n", "1"]
    if program.name.startswith(("llama-perplexity", "llama-imatrix", "ggml-rpc-server")):
        return  # they write no text
    if program.name.startswith("llama-bench"):
        yield _token(*_run([str(program), *common, "-p", "0", "-r", "1", "-v"]))
        return
    talk = {"llama-cli": ["-st"], "llama-completion": ["-no-cnv"]}.get(program.stem, [])
    yield _token(*_run([str(program), *common, "-c", "256", "-p", "The file", *talk]))


def _of_python(python: Path, model: Path | None) -> Iterator[Finding]:
    package = str(Path(__file__).resolve().parents[2])
    argv = [str(python), "-c", _LLAMA_CPP, package, METHOD, *([str(model)] if model else [])]
    code, text = _run(argv, KVQ_BACKEND=str(_paths.backend()), KVQ_LIB_DIR=str(_paths.lib_dir()), GGML_BACKEND_PATH="")
    said = re.search(r"llama-cpp-python \S+", text)
    if not said:
        cure = "pip install llama-cpp-python there, or give the interpreter that has it"
        yield Finding(False, "binding", f"{python}: {_last(text)}", cure)
        return
    yield Finding(True, "binding", f"{python}, {said.group()}")
    if model:
        yield _token(code, text)
    elif code:
        yield Finding(False, "attach", _ours(text) or _last(text), "the line tells the cure")


def _of_node(root: Path, model: Path | None) -> Iterator[Finding]:
    node = shutil.which("node")
    if not node:
        yield Finding(False, "node", "not on PATH", "install Node.js")
        return
    with tempfile.TemporaryDirectory() as folder:  # not -e: it starts node again with our flags
        script = Path(folder) / "look.mjs"
        script.write_text(_NODE)
        code, text = _run([node, str(script), str(root), *([str(model)] if model else [])])
    said = re.search(r"node-llama-cpp \S+", text)
    yield Finding(bool(said), "binding", f"{root}, {said.group() if said else _last(text)}")
    if model and said:
        yield _token(code, text)


def _of_folder(folder: Path) -> Iterator[Finding]:
    """Of a llama.cpp's libraries: no program is there to make a token."""
    version, _, devices, said = plugin.look(folder, _paths.backend().resolve())
    line = (said or [""])[-1]
    good = "KVQ0" in devices
    found = f"{folder}, ggml {version}, devices {', '.join(devices)}"
    yield Finding(good, "libraries", found if good else line or found, "" if good else "the line tells the cure")


def findings(where: str, model: Path | None) -> Iterator[Finding]:
    """Steps for a program of llama.cpp, `ollama`, a Python with llama-cpp-python, a folder with node_modules, or a
    folder with a llama.cpp's libraries. LibraryError: it is none of these.
    """
    given = Path(shutil.which(where) or where).expanduser()
    if not given.exists():
        raise LibraryError(f"{where} does not exist; give a program, or a folder with node_modules or libggml-base.so")
    if given.is_dir():
        for root in (given / "node_modules", given):
            if (root / "node-llama-cpp").is_dir():
                return _of_node(root.resolve(), model)
        return _of_folder(given.resolve())
    if given.name.startswith("python"):
        return _of_python(given.absolute(), model)  # a link tells a virtual environment from its origin
    if given.name == "ollama":
        libraries = given.resolve().parent.parent / "lib" / "ollama"
        if not libraries.is_dir():
            raise LibraryError(f"{libraries} does not exist; give the folder of Ollama's libraries instead")
        return _of_folder(libraries)
    return _of_program(given.resolve(), model)


def checked(where: str, model: str | None) -> Iterator[Finding]:
    """findings(); what is raised becomes a finding."""
    try:
        file = Path(model).expanduser().resolve() if model else None
        if file and not file.is_file():
            raise KvqError(f"{file} is not a file; give a GGUF model")
        yield from findings(where, file)
    except (KvqError, OSError) as e:
        found, _, cure = str(e).partition("; ")
        yield Finding(False, "program", found, cure)
