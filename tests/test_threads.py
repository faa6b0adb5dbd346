"""One Model, two threads; generators that a newer one replaced; children that are forked from a process that has
generated.
"""

from __future__ import annotations

import gc
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import arch_matrix
import pytest
from conftest import ROOT, run_python
from ggml_kvq import Model, _paths, errors

DEMO = Path(__file__).resolve().parent.parent / "models" / "kvq-demo-q8_0.gguf"
PROMPT, OTHER = "The following options are available:\n", "def main():\n"


def open_model() -> Model:
    return Model(DEMO, "kivi", n_ctx=512, n_batch=256, n_threads=1)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with open_model() as m:
        yield m


def greedy(m: Model, prompt: str = PROMPT, n: int = 24) -> str:
    return "".join(m.generate(prompt, max_tokens=n, temperature=0))


def in_thread(call: object) -> list[BaseException]:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()  # type: ignore[operator]
        except BaseException as e:  # handed to the test
            raised.append(e)

    t = threading.Thread(target=run, name="second")
    t.start()
    t.join()
    return raised


def test_a_second_thread_may_not_cut_in(model: Model) -> None:
    want = greedy(model)
    stream = model.generate(PROMPT, max_tokens=24, temperature=0)
    begin = next(stream)
    (raised,) = in_thread(lambda: greedy(model, OTHER))
    assert isinstance(raised, errors.BusyError) and "MainThread" in str(raised), raised
    assert begin + "".join(stream) == want
    assert in_thread(lambda: greedy(model, OTHER)) == []  # the first is at its end


def test_two_threads_at_once_get_their_own_text_or_an_error(model: Model) -> None:
    want = {p: greedy(model, p) for p in (PROMPT, OTHER)}
    got: dict[str, list[str | errors.BusyError]] = {PROMPT: [], OTHER: []}
    barrier = threading.Barrier(2)

    def run(prompt: str) -> None:
        barrier.wait()
        for _ in range(12):
            try:
                got[prompt].append(greedy(model, prompt))
            except errors.BusyError as e:
                got[prompt].append(e)

    threads = [threading.Thread(target=run, args=(p,)) for p in (PROMPT, OTHER)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for prompt, texts in got.items():
        assert all(isinstance(x, errors.BusyError) or x == want[prompt] for x in texts), texts
    assert any(not isinstance(x, errors.BusyError) for texts in got.values() for x in texts)


def test_a_generator_that_was_left_or_whose_thread_ended_is_in_nobodys_way(model: Model) -> None:
    kept: list[Iterator[str]] = []

    def leave() -> None:
        kept.append(model.generate(PROMPT, max_tokens=8))
        next(kept[0])

    assert in_thread(leave) == []
    assert greedy(model)  # that thread has ended
    stream = model.generate(PROMPT, max_tokens=8)
    next(stream)
    del stream
    gc.collect()
    assert in_thread(lambda: greedy(model)) == []


@pytest.mark.parametrize("newer", ["generate", "not begun", "reset", "logits", "load_state"])
def test_an_old_generator_raises(model: Model, newer: str, tmp_path: Path) -> None:
    want = greedy(model)
    model.save_state(tmp_path / "s")
    old = model.generate(OTHER, max_tokens=24, temperature=0)
    next(old)
    model.kv_stats()  # looking is no change
    next(old)
    if newer == "generate":
        new = model.generate(PROMPT, max_tokens=24, temperature=0)
        begin = next(new)
        with pytest.raises(errors.BusyError, match="stale"):
            next(old)
        assert begin + "".join(new) == want
        return
    if newer == "not begun":
        second = model.generate(PROMPT, max_tokens=24, temperature=0)
    elif newer == "reset":
        model.reset()
    elif newer == "logits":
        model.logits(model.tokenize(PROMPT))
    else:
        model.load_state(tmp_path / "s")
    with pytest.raises(errors.BusyError, match="stale"):
        next(old)
    if newer == "not begun":
        assert "".join(second) == want


def test_two_threads_score_without_mixing(model: Model) -> None:
    ids = model.tokenize(PROMPT * 12, add_bos=True)
    want = model.logits(ids, n_ubatch=16)
    got: list[object] = []
    threads = [threading.Thread(target=lambda: got.append(model.logits(ids, n_ubatch=16))) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(got) == 2 and all((x == want).all() for x in got)


def test_figures_while_another_thread_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches were gone between the look at the context and the look at them: IndexError."""
    m, looked, closed = open_model(), threading.Event(), threading.Event()

    def slow() -> int:
        ctx = Model._open(m)
        looked.set()
        closed.wait(0.3)
        return ctx

    def close() -> None:
        looked.wait()
        m.close()
        closed.set()

    monkeypatch.setattr(m, "_open", slow)
    closer = threading.Thread(target=close)
    closer.start()
    assert m.kv_stats()["method"] == "kivi"
    closer.join()
    with pytest.raises(errors.ModelError, match="is closed"):
        m.kv_stats()


FORK = """
import os, sys, signal
from ggml_kvq import Model, errors
path, parent_uses = sys.argv[1], sys.argv[2] == "used"
def open_model():
    return Model(path, "kivi", n_ctx=256, n_batch=64, n_threads=2)
if parent_uses:
    m = open_model()
    want = "".join(m.generate("The", max_tokens=8, temperature=0))
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    calls = [open_model]
    if parent_uses:
        calls += [lambda: next(m.generate("The", max_tokens=8)), lambda: m.logits([1, 2, 3])]
        calls += [m.reset, m.kv_stats, lambda: m.save_state("nowhere")]
    for call in calls:
        try:
            call()
            assert not parent_uses, call
        except errors.ModelError as e:
            assert parent_uses and "fork" in str(e) and "spawn" in str(e), e
    if parent_uses:
        m.close()
    else:
        assert len("".join(open_model().generate("The", max_tokens=8)))
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
if parent_uses:
    assert "".join(m.generate("The", max_tokens=8, temperature=0)) == want
print("both are well")
"""


@pytest.mark.parametrize("parent", ["used", "unused"])
def test_a_forked_child_works_or_raises_at_once(parent: str, demo_model: Path) -> None:
    r = run_python(FORK, str(demo_model), parent)
    assert r.returncode == 0 and "both are well" in r.stdout, r.stderr


def test_two_threads_of_a_program_make_contexts(tmp_path: Path) -> None:
    """A C++ program; Model makes one context at a time. What ggml asked in one thread was taken for the other's, and
    llama.cpp aborted: in one of three runs here, always under the thread sanitizer (scripts/two_contexts.cpp).
    """
    program = arch_matrix.compile_program(
        _paths.lib_dir(), tmp_path / "two_contexts", ROOT / "scripts" / "two_contexts.cpp"
    )
    env = {**os.environ, "GGML_BACKEND_PATH": str(_paths.backend())}
    for method in ("kivi", "minikv"):
        done = subprocess.run(
            [str(program), str(DEMO), "8"],
            env={**env, "KVQ_METHOD": method},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.stdout == "both threads did all\n", done.stdout + done.stderr[-2000:]


def test_a_model_is_closed_while_another_thread_reads_its_vocabulary(demo_model: Path) -> None:
    """tokenize() and detokenize() went on in a vocabulary that close() had freed: the process ended."""
    code = (
        "import sys, threading, time\n"
        "from ggml_kvq import Model, ModelError\n"
        "text = 'Some words of a text, and a few more of them. ' * 20000\n"
        "def read(m):\n"
        "    try:\n"
        "        while True:\n"
        "            m.detokenize(m.tokenize(text))\n"
        "    except ModelError:\n"
        "        pass\n"
        "for i in range(8):\n"
        "    with Model(sys.argv[1], n_ctx=256, n_threads=1) as m:\n"
        "        t = threading.Thread(target=read, args=(m,))\n"
        "        t.start()\n"
        "        time.sleep(0.02 + 0.03 * i)\n"
        "    Model(sys.argv[1], n_ctx=256, n_threads=1).close()\n"
        "    t.join()\n"
        "m = Model(sys.argv[1], n_ctx=256, n_threads=1)\n"
        "threading.Thread(target=read, args=(m,), daemon=True).start()\n"
        "time.sleep(0.1)\n"
        "print('done', flush=True)\n"
    )
    done = run_python(code, str(demo_model))
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
