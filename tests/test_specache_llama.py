"""SpeCache through llama.cpp: text, saved states, copies of sequences, memory and disks that run out."""

from __future__ import annotations

import itertools
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, is_one_text
from ggml_kvq import Model, _paths, errors
from test_llama_features import TEXT, Context

DEMO = ROOT / "models" / "kvq-demo-q8_0.gguf"
PROMPT = (ROOT / "examples" / "prompt.txt").read_text()


def open_model(method: str, opts: str | None = None, **more: Any) -> Model:
    return Model(DEMO, method, opts, **{"n_ctx": 1024, "n_batch": 512, "n_ubatch": 128, "n_threads": 2, **more})


def text_of(
    method: str, opts: str | None = None, n: int = 100, speculate: bool = False, **more: Any
) -> tuple[str, dict[str, Any]]:
    with open_model(method, opts, **more) as m:
        return "".join(m.generate(PROMPT, max_tokens=n, temperature=0, speculate=speculate)), m.kv_stats()


@pytest.fixture(scope="module")
def exact_text() -> str:
    text, _ = text_of("upstream")
    assert len(text) > 200
    return text


# ------------------------------------------------------------------ text

EXACT = [
    "top=1024",
    "top=1024,near=kivi,bits=1,group=128,window=0,sinks=0",
    "top=1024,preset=paper1",
    "top=1024,prompt=near",
    "top=1024,k_bits=2,v_bits=1,near=higgs",
]


@pytest.mark.parametrize("opts", EXACT)
def test_all_cells_fetched_is_the_text_of_f16(exact_text: str, opts: str) -> None:
    text, stats = text_of("specache", opts)
    assert text == exact_text
    # what was read was fetched: every sealed cell of every step, layer and KV head
    assert stats["n_sealed"] > 50 and stats["n_fetched"] > 300 * stats["n_steps"]


def test_none_fetched_is_another_text(exact_text: str) -> None:
    """Else the equal texts above would prove nothing."""
    for opts in ("fetch=off", "top=0"):
        text, stats = text_of("specache", opts)
        assert text != exact_text and stats["n_fetched"] == 0


@pytest.mark.parametrize("n_threads", [1, 2])
def test_64_cells_and_rows_of_8_bits_come_close(exact_text: str, n_threads: int) -> None:
    for opts in ("", "far=q8,top=128", "far=q4,top=1024"):
        text, stats = text_of("specache", opts, 40, n_threads=n_threads)
        assert text[:20] == exact_text[:20], opts
        assert stats["n_fetched"] > 0


def test_ahead_reads_what_the_step_before_picked() -> None:
    hits = []
    for kept in (32, 0):  # those of one step; 4 times as many
        _, stats = text_of("specache", f"fetch=ahead,top=32,kept={kept}", 60)
        assert stats["n_wanted"] > stats["n_hits"] > 0.3 * stats["n_wanted"]
        assert stats["n_fetched"] == pytest.approx(stats["n_wanted"] - stats["n_hits"], rel=0.1)
        hits.append(stats["n_hits"] / stats["n_wanted"])
    assert hits[1] > hits[0] + 0.1
    layers = stats["caches"][0]["layers"]
    assert list(layers) == list(range(stats["n_layer"]))
    for key in ("n_fetched", "n_wanted", "n_hits", "n_steps"):
        assert sum(x[key] for x in layers.values()) == stats[key]


def test_a_guess_picks_what_the_next_token_reads(exact_text: str) -> None:
    """Model.generate(speculate=True): the text of f16 where every row is there, and more rows are than without."""
    near = "near=kivi,group=128,window=32,fetch=ahead"
    text, stats = text_of("specache", f"{near},top=1024,kept=2048", speculate=True)
    assert text == exact_text and stats["n_fetched"] > 0
    hits = {}
    for guess, kept in itertools.product((False, True), (32, 128)):
        _, stats = text_of("specache", f"{near},top=32,kept={kept}", 60, speculate=guess)
        hits[guess, kept] = stats["n_hits"] / stats["n_wanted"]
        assert stats["n_fetched"] < stats["n_wanted"]
    assert hits[True, 32] > hits[False, 32] + 0.1 and hits[True, 128] > hits[False, 128]
    for opts in ("fetch=now", "fetch=off", "preset=paper2"):
        with pytest.raises(errors.KvqError, match="fetch=ahead"):
            text_of("specache", opts, 5, speculate=True)


def test_behind_a_prompt_or_a_state_the_first_token_reads_its_own_picks() -> None:
    """fetch=ahead: nobody has picked for it. So it is that of fetch=now, and what follows does not depend on what was
    in the cache before.
    """
    near = "near=higgs,bits=1,top=32,window=0"

    def run(fetch: str) -> list[np.ndarray]:
        c = Context(DEMO, "specache", f"{near},fetch={fetch}", 2, unified=False)
        text = c.model.tokenize(TEXT, add_bos=True)

        def prompt() -> None:
            c.lib.llama_memory_seq_rm(c.memory, 0, -1, -1)
            c.decode(0, text[:500], 0)
            c.decode(0, text[500:600], 500)

        def answers() -> np.ndarray:
            return np.array([c.decode(0, [text[40 + i]], 600 + i) for i in range(4)])

        prompt()
        out = [answers()]
        state = c.save(0)
        c.decode(1, text[700:1100], 0)  # another stream is not concerned
        c.load(0, state)
        c.lib.llama_memory_seq_rm(c.memory, 0, 600, -1)
        out.append(answers())
        prompt()
        out.append(answers())
        c.lib.llama_memory_clear(c.memory, True)
        prompt()
        out.append(answers())
        c.close()
        return out

    now, ahead = run("now"), run("ahead")
    for x, y in zip(now, ahead, strict=True):
        assert np.abs(x[0] - y[0]).max() < 1e-5
        assert np.abs(x[1:] - y[1:]).max() > 0.01  # these were picked for by others
    for x in ahead[1:]:
        assert np.abs(x - ahead[0]).max() < 1e-5


@pytest.mark.parametrize("where", ["_decode", "truncate"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, errors.DecodeError])
def test_a_guess_does_not_stay_behind_an_error(
    where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between the decoding of a guess and its removal: the text and a saved state went on from the guess."""
    with open_model("specache", "near=kivi,group=128,window=32,fetch=ahead") as m:
        text = "".join(m.generate(PROMPT, max_tokens=5, temperature=0, speculate=True))
        held, usual, pairs = m.tokens, getattr(m, where), []

        def failing(*args: Any) -> Any:
            n = len(m.tokens)
            if where == "_decode":
                out = usual(*args)
                pairs.extend([0] * (len(m.tokens) == n + 2))
            else:  # the first one removes the guess that nobody guessed from
                pairs.append(0)
            if len(pairs) == (4 if where == "_decode" else 5):
                raise error("stop")
            return out if where == "_decode" else usual(*args)

        monkeypatch.setattr(m, where, failing)
        with pytest.raises(error):
            "".join(m.generate(PROMPT, max_tokens=5, temperature=0, speculate=True))
        monkeypatch.undo()
        assert m.tokens == held == m.tokens[: m._libs.llama.llama_memory_seq_pos_max(m._memory, 0) + 1]
        assert text.endswith("".join(m.generate("", reset=False, max_tokens=1, temperature=0)))


def test_a_guess_needs_a_batch_of_two() -> None:
    """One token a batch: what was guessed from was the answer to another token."""
    with pytest.raises(errors.MethodError, match="n_batch=1: pass n_batch=2 or more"):
        text_of("specache", "fetch=ahead", 2, speculate=True, n_batch=1)
    opts = "near=kivi,group=128,window=32,fetch=ahead,top=1024,kept=2048"
    texts = [text_of("specache", opts, 6, speculate=guess, n_batch=2, n_ubatch=1)[0] for guess in (True, False)]
    assert texts[0] == texts[1]


def test_a_prompt_reads_near_blocks_when_asked_to() -> None:
    """Logits of a prompt's last ubatch: exact as f16 has them, near as generation does. near=aqua marks positions in
    the lowest bits of keys, which is more than rounding in this model.
    """
    rows = {}
    for name, (method, opts) in {
        "f16": ("f16", None),
        "exact": ("specache", "near=higgs,top=0"),
        "near": ("specache", "near=higgs,top=0,prompt=near"),
    }.items():
        with open_model(method, opts) as m:
            rows[name] = np.asarray(m.logits(m.tokenize(PROMPT, add_bos=True)[:420])[-20:], np.float64)
    assert np.abs(rows["exact"] - rows["f16"]).max() < 2e-2 < 0.3 < np.abs(rows["near"] - rows["f16"]).max()


def test_a_call_of_32_tokens_reads_far_rows_and_one_of_31_does_not() -> None:
    """top=0: the only far rows that are read are those of prompts."""
    with open_model("f16") as m:
        tokens = m.tokenize(PROMPT, add_bos=True)[:332]
        f16 = np.asarray(m.logits(tokens)[300:], np.float64)
    off = {}
    for n in (32, 31):
        with open_model("specache", "near=higgs,top=0") as m:
            for _ in m.feed(tokens[:300]):
                pass
            (rows,) = m.feed(tokens[300 : 300 + n], outputs=np.ones(n, bool))
            off[n] = np.abs(rows - f16[:n]).max()
    assert off[32] < 2e-2 < 0.3 < off[31]


# ------------------------------------------------------------------ saved states


def rows_of(path: Path, n: int) -> bytes:
    """The rows of all layers: behind tokens, architecture and cells (test_states.rows_at)."""
    return path.read_bytes()[-24 * (12 + n * 256) :]


def test_rows_of_a_state_stay_as_they_are_wherever_they_go(tmp_path: Path) -> None:
    """From pages of 128 cells to pages of 32, to upstream's f16, to ours, to other rows windows, and back."""
    ways = [
        ("specache", "near=kivi,group=128,window=0,sinks=0"),
        ("specache", "window=32"),
        ("upstream", None),
        ("specache", "preset=paper2,top=1024"),
        ("f16", None),
        ("specache", "near=kivi,group=128,window=0,sinks=0"),
    ]
    first: bytes = b""
    texts = []
    for i, (method, opts) in enumerate(ways):
        with open_model(method, opts) as m:
            if i:
                assert m.load_state(tmp_path / f"{i - 1}") == 300
            else:
                for _ in m.feed(m.tokenize(TEXT, add_bos=True)[:300]):
                    pass
            assert method != "specache" or m.kv_stats()["n_sealed"] >= 24, "nothing lies in two tiers"
            m.save_state(tmp_path / f"{i}")
            rows = rows_of(tmp_path / f"{i}", 300)
            first = first or rows
            assert rows == first, (i, method, opts)
            texts.append("".join(m.generate("", reset=False, max_tokens=4, temperature=0)))
    assert texts[2] == texts[3] == texts[4]


def test_far_rows_of_8_bits_travel_as_what_they_decode_to(tmp_path: Path) -> None:
    with open_model("specache", "far=q8,window=0,sinks=0") as m:
        for _ in m.feed(m.tokenize(TEXT, add_bos=True)[:300]):
            pass
        m.save_state(tmp_path / "s")
        want = m.logits([5, 6, 7])
    with open_model("specache", "far=f16,window=0,sinks=0,top=1024") as m:
        assert m.load_state(tmp_path / "s") == 300
        m.save_state(tmp_path / "t")
        assert rows_of(tmp_path / "s", 300) == rows_of(tmp_path / "t", 300)
        assert np.isfinite(m.logits([5, 6, 7])).all() and np.isfinite(want).all()


# ------------------------------------------------------------------ sequences


@pytest.mark.parametrize("place", ["host", "device", "FILE"])
@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
def test_copies_erased_cells_and_slots_used_again(tmp_path: Path, unified: bool, place: str) -> None:
    """The same tokens by another way: copied, cut, shifted back and forth, written anew; all cells fetched."""
    where = str(tmp_path / "rows") if place == "FILE" else place
    c = Context(DEMO, "specache", f"top=1024,window=32,place={where}", 2, unified)
    reference = Context(DEMO, "f16", "", 2, unified)
    tokens = c.model.tokenize(TEXT, add_bos=True)[:700]
    out = []
    for x in (c, reference):
        x.decode(1, tokens[400:700], 0)  # what slots held before
        x.lib.llama_memory_seq_rm(x.memory, 1, -1, -1)
        x.decode(0, tokens[:400], 0)
        x.lib.llama_memory_seq_cp(x.memory, 0, 1, -1, -1)
        logits = [x.decode(1, tokens[400:402], 400)]
        assert x.lib.llama_memory_seq_rm(x.memory, 1, 150, -1)
        logits.append(x.decode(1, tokens[300:420], 150))
        logits.append(x.decode(0, tokens[400:402], 400))  # the one that was copied is as it was
        x.lib.llama_memory_seq_rm(x.memory, 0, 4, 68)
        x.lib.llama_memory_seq_add(x.memory, 0, 68, -1, -64)
        logits.append(x.decode(0, tokens[402:403], 338))
        x.lib.llama_memory_clear(x.memory, True)
        x.decode(0, tokens[:200], 0)
        logits.append(x.decode(0, tokens[200:201], 200))
        out.append(logits)
        x.close()
    for step, (p, q) in enumerate(zip(*out, strict=True)):
        kld = float((np.exp(q) * (q - p)).sum())
        assert kld < 2e-3, (step, kld)
    assert not list(tmp_path.iterdir())


def test_a_copy_reads_the_rows_that_its_source_kept() -> None:
    """fetch=ahead: what the first step of a copied stream reads was picked before it was copied."""
    c = Context(DEMO, "specache", "near=higgs,fetch=ahead,top=64,window=32", 2, False)
    tokens = c.model.tokenize(TEXT, add_bos=True)[:404]
    c.decode(0, tokens[:400], 0)
    for i in range(400, 403):
        c.decode(0, tokens[i : i + 1], i)
    c.lib.llama_memory_seq_cp(c.memory, 0, 1, -1, -1)
    copy, source = (c.decode(seq, tokens[403:], 403) for seq in (1, 0))
    c.close()
    assert np.abs(copy - source).max() < 1e-4


# ------------------------------------------------------------------ memory and disks that run out


def program(opts: str, *args: str, n: int = 16, **more: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "GGML_BACKEND_PATH": str(_paths.backend()), "KVQ_METHOD": "specache", "KVQ_OPTS": opts}
    env |= more.pop("env", {})
    flags = f"-m {DEMO} -dev KVQ0 -fa on -c 1024 -t 2 --temp 0 -n {n} -no-cnv --no-warmup -ub 128".split()
    argv = [*more.pop("before", []), str(_paths.program("llama-completion")), *flags, "-f", "examples/prompt.txt"]
    return subprocess.run(
        [*argv, *args], check=False, env=env, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
        cwd=ROOT, **more,
    )  # fmt: skip


def kvq_lines(r: subprocess.CompletedProcess[str], what: str) -> list[str]:
    return [line for line in r.stderr.splitlines() if line.startswith("ggml-kvq:") and what in line]


def sealed(r: subprocess.CompletedProcess[str]) -> int:
    found = re.search(r"specache: (\d+) pages sealed", r.stderr)
    return int(found[1]) if found else 0


def test_without_host_memory_cells_stay_open_and_a_line_says_so() -> None:
    right = program("top=1024", n=60)
    short = program("top=1024", n=60, env={"KVQ_FAR_LIMIT": "1"})
    none = program("top=1024", n=60, env={"KVQ_FAR_LIMIT": "0"})
    assert right.returncode == short.returncode == none.returncode == 0, short.stderr
    assert is_one_text(right.stdout, short.stdout, none.stdout) and len(right.stdout) > 1000

    assert sealed(right) > sealed(short) > 0 == sealed(none)
    assert not kvq_lines(right, "far rows")
    for r in (short, none):
        (line,) = kvq_lines(r, "far rows")
        assert "far=q4" in line and "place=PATH" in line and "stay f16" in line


def refused(r: subprocess.CompletedProcess[str], *words: str) -> None:
    assert r.returncode > 0, r.stderr
    (line,) = kvq_lines(r, "error")
    assert all(w in line for w in words), line


def test_a_file_of_rows(tmp_path: Path) -> None:
    right, r = program("top=1024"), program(f"top=1024,place={tmp_path}/rows")
    assert r.returncode == 0 and is_one_text(r.stdout, right.stdout)
    (line,) = kvq_lines(r, "KV cache")
    assert f"{tmp_path}/rows, 15.50 bits" in line
    assert not kvq_lines(r, "far rows") and sealed(r) == sealed(right) > 0
    assert not list(tmp_path.iterdir())


def test_a_file_holds_a_context_that_is_full(tmp_path: Path) -> None:
    r = program(f"near=higgs,place={tmp_path}/rows", "--ignore-eos", n=900)
    assert r.returncode == 0 and not kvq_lines(r, "far rows"), r.stderr[-1000:]
    # all 32 pages of 2 lanes of 12 layers but the sinks and what the window holds
    assert sealed(r) >= 2 * 12 * (32 - 1 - 2), r.stderr[-1000:]


def test_cells_that_are_cut_give_their_rows_back(tmp_path: Path) -> None:
    with open_model("specache", f"near=higgs,window=0,place={tmp_path}/rows") as m:
        tokens = m.tokenize(TEXT, add_bos=True)[:1000]
        counts = []
        for _ in range(4):
            for _ in m.feed(tokens[len(m.tokens) :]):
                pass
            counts.append(m.kv_stats()["n_sealed"])
            m.truncate(32)
    assert len(tokens) == 1000 and np.diff([0, *counts]).min() == counts[0], counts


def test_a_file_that_exists_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("mine")
    refused(program(f"place={tmp_path}/rows"), f"{tmp_path}/rows", "exists already")
    assert (tmp_path / "rows").read_text() == "mine"
    refused(program(f"place={tmp_path}/no/rows"), "No such file", "folder that you may write to")
    refused(program(f"place={tmp_path}"), f"{tmp_path}: is a folder", "name a file in it")


def test_a_limit_on_files_is_met_before_the_first_token(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    r = program(f"place={tmp_path}/rows", preexec_fn=limit)
    refused(r, f"{tmp_path}/rows", "far=q4", "File too large")
    assert not r.stdout and not list(tmp_path.iterdir())


def test_a_full_disk_is_met_before_the_first_token() -> None:
    """A file system of one MiB of our own, in a namespace of its own."""
    script = 'mount -t tmpfs -o size=1m none /mnt && exec "$@"'
    before = ["unshare", "-rm", "sh", "-c", script, "sh"]
    if not shutil.which("unshare") or subprocess.run([*before, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this system lets nobody make a file system of his own")
    r = program("place=/mnt/rows", before=before)
    refused(r, "/mnt/rows", "No space left", "far=q4")
    assert not r.stdout


KILLED = """
import sys, time
from ggml_kvq import Model
with Model(sys.argv[1], "specache", "place=" + sys.argv[2] + "/rows", n_ctx=512, n_threads=1) as m:
    for _ in m.feed(m.tokenize("one two three four five six seven. " * 50, add_bos=True)[:300]):
        pass
    print("go", flush=True)
    time.sleep(60)
"""


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    p = subprocess.Popen([sys.executable, "-c", KILLED, str(DEMO), str(tmp_path)], stdout=subprocess.PIPE)
    assert p.stdout is not None and p.stdout.readline() == b"go\n"
    mapped = Path(f"/proc/{p.pid}/maps").read_text()
    assert f"{tmp_path}/rows (deleted)" in mapped, "the rows are not in the file"
    p.send_signal(signal.SIGKILL)
    p.wait()
    p.stdout.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("opts", "words"),
    [
        ("place=memory", ["place=memory", "host|device|PATH"]),
        ("place=PATH", ["place=PATH"]),
        ("near=zipcache", ["near=zipcache", "higgs|kivi"]),
        ("top=1025", ["top=1025", "0..1024"]),
        ("top=-1", ["top=-1", "0..1024"]),
        ("far=q5", ["far=q5", "f16|q8|q4"]),
        ("fetch=soon", ["fetch=soon"]),
        ("preset=paper3", ["preset=paper3"]),
        ("bits=5", ["bits=5"]),
        ("depth=3", ["depth", "top"]),
    ],
)
def test_options_that_are_none_are_refused_in_one_line(opts: str, words: list[str]) -> None:
    with pytest.raises(errors.MethodError) as e:
        open_model("specache", opts)
    assert "\n" not in str(e.value).strip() and all(w in str(e.value) for w in words), e.value
