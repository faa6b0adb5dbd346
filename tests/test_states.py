"""Saved states: damaged, cut off and foreign ones are refused, in Python and in llama.cpp's own programs; whole
ones come back bit for bit.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from conftest import ROOT, is_one_text
from ggml_kvq import Model, _paths, errors
from ggml_kvq.core import loader

DEMO = ROOT / "models" / "kvq-demo-q8_0.gguf"
TEXT = "The register file holds sixteen words. Each word is read by the decoder before the next cycle begins. " * 12
CASES = {
    "f16": ("f16", None),
    "kivi": ("kivi", None),
    "kivi4": ("kivi", "bits=4,group=64,scales=u8,sinks=4"),
    "xquant": ("xquant", None),
    "higgs": ("higgs", None),
    "aqua": ("aqua", "predictor=none"),
    "zipcache": ("zipcache", None),
    "minikv": ("minikv", None),
    "specache": ("specache", "window=32"),
    "window": ("higgs", "window=auto"),
}
MARKED = [c for c in CASES if c not in ("f16", "specache")]  # rows as they came have no bit to spare


def open_model(case: str, path: Path = DEMO, **kwargs: Any) -> Model:
    method, opts = CASES[case]
    return Model(path, method, opts, **{"n_ctx": 1024, "n_batch": 512, "n_ubatch": 128, "n_threads": 1, **kwargs})


@pytest.fixture(scope="module")
def opened() -> Iterator[dict[str, Model]]:
    models: dict[str, Model] = {}
    yield models
    for m in models.values():
        m.close()


@pytest.fixture
def prepared(opened: dict[str, Model], tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Model, Path, bytes]:
    """(model that holds 300 tokens, path of its state, the state)"""
    case = request.param
    m = opened.setdefault(case, open_model(case))
    m.reset()
    for _ in m.feed(m.tokenize(TEXT, add_bos=True)[:300]):
        pass
    m.save_state(tmp_path / "state")
    return m, tmp_path / "state", (tmp_path / "state").read_bytes()


def changed(data: bytes, n: int, seed: int, first: int = 0) -> bytes:
    out, rng = bytearray(data), random.Random(seed)
    for _ in range(n):
        out[rng.randrange(first, len(out))] ^= rng.randrange(1, 256)
    return bytes(out)


def refused(m: Model, path: Path, data: bytes) -> str:
    path.write_bytes(data)
    before = m.tokens
    with pytest.raises(errors.StateError) as e:
        m.load_state(path)
    assert m.tokens in ([], before) and path.name in str(e.value) and "\n" not in str(e.value)
    return str(e.value)


@pytest.mark.parametrize("prepared", CASES, indirect=True)
def test_2000_bytes_changed_12_of_12_are_refused(prepared: tuple[Model, Path, bytes]) -> None:
    m, path, data = prepared
    for seed in range(12):
        refused(m, path, changed(data, 2000, seed))
    path.write_bytes(data)
    assert m.load_state(path) == 300  # and the model is as usable as before


def rows_at(data: bytes) -> int:
    """Where the rows begin: behind tokens, architecture and cells, of which the demo model has 12 bytes each."""
    return len(data) - 24 * (12 + 300 * 256)


@pytest.mark.parametrize("prepared", MARKED, indirect=True)
def test_a_single_bit_of_the_rows_is_enough(prepared: tuple[Model, Path, bytes]) -> None:
    m, path, data = prepared
    first, rng = rows_at(data), random.Random(7)
    for _ in range(25):
        one = bytearray(data)
        one[rng.randrange(first, len(one))] ^= 1 << rng.randrange(8)
        refused(m, path, bytes(one))


@pytest.mark.parametrize("prepared", ["kivi", "minikv", "aqua", "specache", "window"], indirect=True)
def test_a_state_comes_back_bit_for_bit_and_saves_the_same_bytes(prepared: tuple[Model, Path, bytes]) -> None:
    m, path, data = prepared
    ids = m.tokenize("In the beginning", add_bos=False)
    want = [x.copy() for x in m.feed(ids, outputs=[1] * len(ids), n_ubatch=1)]
    assert m.load_state(path) == 300
    m.save_state(path)
    assert path.read_bytes() == data
    assert all((a == b).all() for a, b in zip(want, m.feed(ids, outputs=[1] * len(ids), n_ubatch=1)))


@pytest.mark.parametrize("prepared", ["kivi"], indirect=True)
def test_a_file_that_is_cut_off_says_so(prepared: tuple[Model, Path, bytes]) -> None:
    m, path, data = prepared
    for n in (4, 11, 12, 600, 1300, 2000, len(data) // 3, len(data) - 1):
        assert "cut off" in refused(m, path, data[:n]), n
    assert refused(m, path, data + b"x")
    assert "no saved state" in refused(m, path, b"GGUF" + data[4:])


def at_position(row: bytes, position: int) -> bytes:
    """A row of keys that says it stands there (policy/tags.h): the last bits of its first 64 channels."""
    check = (position ^ 0x5BD1E995) * 0x9E3779B1 & 0xFFFFFFFF
    bits, out = check << 32 | position, bytearray(row)
    for channel in range(64):
        out[2 * channel] = out[2 * channel] & 0xFE | bits >> channel & 1
    return bytes(out)


def test_a_position_that_no_cache_has_is_refused_by_its_number(tmp_path: Path) -> None:
    """Of rows that no checksum covers: nothing is sealed yet. Tables for such a position would take 1 GB."""
    with open_model("aqua") as m:
        for _ in m.feed(m.tokenize(TEXT, add_bos=True)[:100]):
            pass
        m.save_state(tmp_path / "state")
        data = (tmp_path / "state").read_bytes()
        row = len(data) - 24 * (12 + 100 * 256) + 12 + 40 * 256  # keys of layer 0, cell 40
        assert at_position(data[row : row + 256], 40) == data[row : row + 256]
        for position in ((1 << 20) - 1, 1 << 20, (1 << 26) - 1):
            bad = data[:row] + at_position(data[row : row + 256], position) + data[row + 256 :]
            if position < 1 << 20:
                (tmp_path / "state").write_bytes(bad)
                assert m.load_state(tmp_path / "state") == 100
            else:
                why = refused(m, tmp_path / "state", bad)
                assert f"position {position}, and a cache of 1024 cells takes positions below 1048576" in why
        (tmp_path / "state").write_bytes(data)
        assert m.load_state(tmp_path / "state") == 100
        assert "".join(m.generate("", reset=False, max_tokens=2))


@pytest.mark.parametrize("prepared", ["kivi"], indirect=True)
def test_other_tokens_than_those_of_the_cache_are_refused(prepared: tuple[Model, Path, bytes]) -> None:
    m, path, data = prepared
    one = bytearray(data)
    one[12 + 4 * 100] ^= 1
    assert "tokens" in refused(m, path, bytes(one))


@pytest.mark.parametrize("prepared", ["kivi"], indirect=True)
def test_a_state_of_another_model_of_the_same_shape_is_refused(
    prepared: tuple[Model, Path, bytes], tmp_path: Path
) -> None:
    raw = bytearray(DEMO.read_bytes())
    for t in gguf.GGUFReader(DEMO).tensors:
        if t.name.endswith("attn_norm.weight"):
            raw[t.data_offset : t.data_offset + t.n_bytes] = bytes.fromhex("0000803f") * (t.n_bytes // 4)
    (tmp_path / "other.gguf").write_bytes(raw)
    _, path, data = prepared
    with open_model("kivi", tmp_path / "other.gguf") as other:
        assert "another model" in refused(other, path, data)


@pytest.mark.parametrize(
    ("first", "second"), [("kivi", "f16"), ("f16", "kivi"), ("kivi", "kivi4"), ("kivi4", "xquant")]
)
def test_rows_of_another_method_are_still_read_and_still_checked(
    opened: dict[str, Model], first: str, second: str, tmp_path: Path
) -> None:
    a, b = (opened.setdefault(c, open_model(c)) for c in (first, second))
    a.reset()
    for _ in a.feed(a.tokenize(TEXT, add_bos=True)[:300]):
        pass
    a.save_state(tmp_path / "s")
    assert b.load_state(tmp_path / "s") == 300
    assert "".join(b.generate("", reset=False, max_tokens=8, temperature=0))
    if first != "f16":
        data = bytearray((tmp_path / "s").read_bytes())
        data[-100000] ^= 4
        assert "damaged" in refused(b, tmp_path / "s", bytes(data))


def test_a_damaged_state_set_from_memory_stops_the_cache_until_it_is_cleared(tmp_path: Path) -> None:
    """llama_state_set_data sets tensors where nothing may be thrown: no batch is computed on what came in."""
    lib = loader.libraries().llama
    with open_model("kivi") as m:
        for _ in m.feed(m.tokenize(TEXT, add_bos=True)[:300]):
            pass
        n = lib.llama_state_get_size(m._ctx)
        data = (ctypes.c_uint8 * n)()
        assert lib.llama_state_get_data(m._ctx, data, n) == n
        m.reset()
        assert lib.llama_state_set_data(m._ctx, data, n) == n
        m._tokens = m.tokenize(TEXT, add_bos=True)[:300]
        assert "".join(m.generate("", reset=False, max_tokens=2))
        m.reset()
        data[n - 50000] ^= 1
        lib.llama_state_set_data(m._ctx, data, n)
        m._tokens = m.tokenize(TEXT, add_bos=True)[:300]
        with pytest.raises(errors.DecodeError):
            "".join(m.generate("", reset=False, max_tokens=2))
        assert "".join(m.generate("The", max_tokens=4))  # cleared


# ------------------------------------------------------------------ llama.cpp's own programs


def environment(method: str = "kivi") -> dict[str, str]:
    return {**os.environ, "KVQ_METHOD": method, "GGML_BACKEND_PATH": str(_paths.backend())}


def program(name: str) -> str:
    return str(_paths.program(name))


def test_llama_completion_refuses_a_damaged_prompt_cache(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text(TEXT)
    flags = [
        "-m",
        str(DEMO),
        "-dev",
        "KVQ0",
        "-fa",
        "on",
        "-c",
        "1024",
        "-t",
        "1",
        "--temp",
        "0",
        "-n",
        "4",
        "-f",
        str(tmp_path / "p.txt"),
    ]
    argv = [program("llama-completion"), *flags, "-no-cnv", "--no-warmup", "--prompt-cache", str(tmp_path / "cache")]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv, check=False, env=environment(), capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
        )

    first, again = run(), run()
    assert first.returncode == again.returncode == 0 and "exact match" in again.stderr
    assert is_one_text(first.stdout, again.stdout)
    (tmp_path / "cache").write_bytes(changed((tmp_path / "cache").read_bytes(), 10, 1, 6000))
    bad = run()
    assert bad.returncode == 1, bad.stderr
    (line,) = [x for x in bad.stderr.splitlines() if x.startswith("ggml-kvq: error")]
    assert "the saved state is damaged" in line


def test_llama_server_refuses_a_damaged_slot_and_serves_on(tmp_path: Path) -> None:
    port = 18000 + os.getpid() % 2000
    flags = [
        "-m",
        str(DEMO),
        "-dev",
        "KVQ0",
        "-fa",
        "on",
        "-c",
        "4096",
        "-np",
        "4",
        "-t",
        "1",
        "--port",
        str(port),
        "--slot-save-path",
        f"{tmp_path}/",
    ]
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(
            [program("llama-server"), *flags], env=environment(), stdout=log, stderr=subprocess.STDOUT
        )

    def post(path: str, **body: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as r:
                return dict(json.loads(r.read()))
        except urllib.error.HTTPError as e:
            return {"code": e.code, "body": e.read().decode()}

    def ask(slot: int, prompt: str) -> tuple[str, int]:
        r = post("/completion", prompt=prompt, n_predict=8, temperature=0, id_slot=slot, cache_prompt=True)
        return r["content"], r["timings"]["prompt_n"]

    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        want, other = ask(1, TEXT)[0], ask(2, TEXT[::-1])[0]
        post("/slots/1?action=save", filename="s")
        good = (tmp_path / "s").read_bytes()
        (tmp_path / "bad").write_bytes(changed(good, 5, 3, 6000))
        post("/slots/1?action=erase")
        assert post("/slots/1?action=restore", filename="bad").get("code") == 400
        assert ask(2, TEXT[::-1])[0] == other
        assert ask(1, TEXT)[0] == want  # computed anew: nothing of the damaged state is left
        post("/slots/1?action=erase")
        assert post("/slots/3?action=restore", filename="s")["n_restored"] > 300
        assert ask(3, TEXT) == (want, 1)
        assert "the saved state is damaged" in (tmp_path / "log").read_text()
    finally:
        server.terminate()
        server.wait(30)


KILLED = """
import sys
from ggml_kvq import Model
path, folder = sys.argv[1:]
with Model(path, "kivi", n_ctx=512, n_batch=256, n_threads=1) as m:
    for _ in m.feed(m.tokenize("one two three four five six seven. " * 50, add_bos=True)[:300]):
        pass
    print("go", flush=True)
    while True:
        m.save_state(folder + "/state")
"""


def test_a_process_killed_while_it_writes_leaves_whole_states(tmp_path: Path) -> None:
    rng = random.Random(3)
    with Model(DEMO, "kivi", n_ctx=512, n_batch=256, n_threads=1) as m:
        for _ in range(4):
            p = subprocess.Popen([sys.executable, "-c", KILLED, str(DEMO), str(tmp_path)], stdout=subprocess.PIPE)
            assert p.stdout is not None and p.stdout.readline() == b"go\n"
            time.sleep(0.05 + 0.2 * rng.random())
            p.send_signal(signal.SIGKILL)
            p.wait()
            p.stdout.close()
            assert m.load_state(tmp_path / "state") == 300
            left = list(tmp_path.glob(".*.part"))
            assert len(left) <= 1  # the next writer removes it
            for part in left:  # what it was writing: whole or refused
                try:
                    assert m.load_state(part) == 300
                except errors.StateError:  # one without a beginning touches nothing
                    assert len(m.tokens) == (0 if part.stat().st_size > 64 else 300)


def test_a_server_killed_while_it_writes_leaves_no_state_that_lies(tmp_path: Path) -> None:
    """kill -9 at random moments; 20 times with scripts/kill_while_saving.py."""
    script = Path(__file__).resolve().parents[1] / "scripts" / "kill_while_saving.py"
    command = [sys.executable, str(script), "--kills", "4", "--characters", "2500"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout)
    assert counts["refused"] + counts["whole"] + counts["absent"] == 4 and counts["bytes"] > 1 << 20


def test_the_clock_of_states_runs_and_finds_the_same_bytes() -> None:
    """scripts/bench_states.py on few tokens: rows and blocks come back as they were, and pages come as blocks."""
    r = subprocess.run(
        [
            *(sys.executable, str(ROOT / "scripts" / "bench_states.py"), "-m", str(DEMO), "--depth", "600"),
            *("--rounds", "1", "-t", "2", "--arms", "upstream,kivi,higgs,minikv,kivi:state=compact"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert r.returncode == 0, r.stderr
    lines = r.stdout.splitlines()
    assert len(lines) == 6 and all("get " in line and "set " in line for line in lines[1:]), r.stdout
    assert "NOT the same" not in r.stdout
