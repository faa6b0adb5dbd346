"""A ggml that is not what we take it for: patched copies of the pinned one, each refused with one line that names what
moved. Built without optimisation, all of ggml in one file that shows its names, as xllamacpp's module does.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conftest import ROOT
from ggml_kvq import _paths

SOURCES = (
    "ggml.c",
    "ggml.cpp",
    "ggml-alloc.c",
    "ggml-backend.cpp",
    "ggml-backend-dl.cpp",
    "ggml-backend-meta.cpp",
    "ggml-backend-reg.cpp",
    "ggml-opt.cpp",
    "ggml-quants.c",
    "ggml-threading.cpp",
    "gguf.cpp",
)
LOAD = """
import ctypes, sys
ggml = ctypes.CDLL(sys.argv[1])
ggml.ggml_backend_load.restype = ctypes.c_void_p
print("accepted" if ggml.ggml_backend_load(sys.argv[2].encode()) else "refused", ggml.ggml_backend_dev_count())
"""


@dataclass
class Patch:
    said: str  # part of the one line; "": it is accepted without a word
    file: str = "src/ggml.c"
    old: str = ""
    new: str = ""
    version: str = "0.25.3"
    flags: list[str] = field(default_factory=list)  # for gguf.cpp


PATCHES = {
    "as it is": Patch(""),
    "attention's parameters in another order": Patch(
        "parameter scale of ggml_flash_attn_ext is not where it is read",
        old="float params[] = { scale, max_bias, logit_softcap };",
        new="float params[] = { max_bias, scale, logit_softcap };",
    ),
    "a parameter of rope elsewhere": Patch(
        "parameter freq_base of ggml_rope_ext is not where it is read",
        old="memcpy(params +  5, &freq_base,    sizeof(float));\n    memcpy(params +  6, &freq_scale,",
        new="memcpy(params +  6, &freq_base,    sizeof(float));\n    memcpy(params +  5, &freq_scale,",
    ),
    "other operands of set_rows": Patch(
        "the rows of ggml_set_rows is not where it is read",
        old="result->op     = GGML_OP_SET_ROWS;\n    result->src[0] = b;\n    result->src[1] = c;",
        new="result->op     = GGML_OP_SET_ROWS;\n    result->src[0] = c;\n    result->src[1] = b;",
    ),
    "a function is missing": Patch(
        "has no function gguf_get_val_u16", file="src/gguf.cpp", flags=["-Dgguf_get_val_u16=gguf_get_val_of_16"]
    ),
    "two members of a device in another order": Patch(
        "ggml_backend_device_i::get_name is at byte 8, not at 0",
        file="src/ggml-backend-impl.h",
        old="const char * (*get_name)(ggml_backend_dev_t dev);\n\n        // device description: short informative "
        "description of the device, could be the model name\n"
        "        const char * (*get_description)(ggml_backend_dev_t dev);",
        new="const char * (*get_description)(ggml_backend_dev_t dev);\n"
        "        const char * (*get_name)(ggml_backend_dev_t dev);",
    ),
    "a member more in a device": Patch(
        "ggml_backend_device::reg is at byte 128, not at 120",
        file="src/ggml-backend-impl.h",
        old="void                 (*event_synchronize) (ggml_backend_dev_t dev, ggml_backend_event_t event);",
        new="void (*event_synchronize) (ggml_backend_dev_t dev, ggml_backend_event_t event); void * more;",
    ),
    "a member more in a buffer type": Patch(
        "ggml_backend_buffer_type::device is at byte 56, not at 48",
        file="src/ggml-backend-impl.h",
        old="bool                  (*is_host)       (ggml_backend_buffer_type_t buft);",
        new="bool (*is_host) (ggml_backend_buffer_type_t buft); void * more;",
    ),
    "a longer tensor": Patch(
        "the end of ggml_tensor is not where it is read",
        file=str(Path("include") / "ggml.h"),
        old="void * extra; // extra things e.g. for ggml-cuda.cu",
        new="void * extra; char more[16];",
    ),
    "a version between known ones": Patch("", version="0.23.0"),
    "a newer version": Patch("ggml 0.99.0 is newer than those that were tested", version="0.99.0"),
    "an older version": Patch("this is ggml 0.9.4, older than all that are known", version="0.9.4"),
}


@pytest.fixture(scope="module")
def tree() -> Path:
    fetched = [sys.executable, str(ROOT / "scripts/fetch_llama_cpp.py")]
    return Path(subprocess.run(fetched, capture_output=True, text=True, check=True).stdout.strip()) / "ggml"


@pytest.fixture(scope="module")
def plain(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder with the objects of the unpatched sources."""
    folder = tmp_path_factory.mktemp("plain")
    compile_all(tree, folder, SOURCES, Patch(""))
    yield folder


def compile_all(tree: Path, folder: Path, sources: tuple[str, ...], patch: Patch) -> None:
    version = f'#define GGML_VERSION "{patch.version}"\n#define GGML_COMMIT "none"\n'
    (folder / "ggml-version.h").write_text(version)  # ggml's build writes one

    def one(name: str) -> None:
        language = ["cc", "-std=gnu11"] if name.endswith(".c") else ["c++", "-std=c++17"]
        shared = ["-fPIC", "-DGGML_BUILD", "-DGGML_SHARED", "-DGGML_BACKEND_SHARED", "-DGGML_BACKEND_DL"]
        flags = patch.flags if name == "gguf.cpp" else []
        where = [f"-I{tree}/include", f"-I{tree}/src", "-c", f"{tree}/src/{name}", "-o", f"{folder}/{name}.o"]
        done = subprocess.run(
            [*language, "-O0", "-w", "-D_GNU_SOURCE", *shared, *flags, f"-I{folder}", *where],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, sources))


@pytest.mark.parametrize("name", PATCHES)
def test_what_is_elsewhere_is_refused_by_its_name(name: str, tree: Path, plain: Path, tmp_path: Path) -> None:
    patch, copy, objects = PATCHES[name], tmp_path / "ggml", tmp_path / "objects"
    objects.mkdir()
    for part in ("include", "src"):
        (copy / part).mkdir(parents=True)
        for file in (tree / part).iterdir():
            if file.is_file():
                shutil.copy(file, copy / part)
    (copy / "src" / "ggml-cpu").symlink_to(tree / "src" / "ggml-cpu")
    if patch.old:
        text = (copy / patch.file).read_text()
        assert text.count(patch.old) == 1, patch.old
        (copy / patch.file).write_text(text.replace(patch.old, patch.new))
    changed = SOURCES if patch.file.endswith(".h") else (Path(patch.file).name,)
    compile_all(copy, objects, changed, patch)
    files = [objects / f"{s}.o" if s in changed else plain / f"{s}.o" for s in SOURCES]
    library = tmp_path / "libllama-of-somebody.so"
    subprocess.run(["c++", "-shared", *map(str, files), "-ldl", "-lpthread", "-o", str(library)], check=True)
    command = [sys.executable, "-c", LOAD, str(library), str(_paths.backend())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    ours = [line for line in done.stderr.splitlines() if line.startswith("ggml-kvq: ")]
    accepted = not patch.said or "newer than" in patch.said
    assert done.stdout.split()[0] == ("accepted" if accepted else "refused"), done.stderr
    assert int(done.stdout.split()[1]) == (2 if accepted else 0)
    assert len(ours) == bool(patch.said) and all(patch.said in line for line in ours), done.stderr
