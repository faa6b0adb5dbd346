"""One thread computes for a process, so there is one team of OpenMP threads, from whatever thread a call comes. Ctrl-C
ends the wait for it and leaves nothing that computes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import run_python
from ggml_kvq import Model, processes

ROOT = Path(__file__).resolve().parents[1]
NAME = "ggml-kvq-compute"

TEAMS = """
import os, sys, threading
import numpy as np
from ggml_kvq import Model
from ggml_kvq.core import kernels, loader

def native():
    "threads that Python did not start"
    return len(os.listdir("/proc/self/task")) - threading.active_count()

path, method, state = sys.argv[1:]
with Model(path, method, n_ctx=512, n_threads=2) as m:
    before = native()
    def calls():
        for _ in range(2):
            assert "".join(m.generate("The file is read by the program. " * 20, max_tokens=8, temperature=0))
            yield "generate"
        m.logits(list(range(100)))
        yield "logits"
        for _ in m.feed([1, 2, 3]):
            yield "feed"
        m.perplexity(list(range(200)) * 3, n_ctx=256)
        yield "perplexity"
        m.save_state(state)
        m.load_state(state)
        yield "state"
        x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
        lib = loader.libraries().need_kvq()
        kernels.predict(lib, kernels.pack_weights(lib, x, 8), x, None, 2)
        yield "predict"

    def count(where):
        for name in calls():
            more = native() - before
            assert more <= 1, f"{name} in the {where} thread: {more} threads beside those that compute"
    count("main")
    raised = []
    def other():
        try:
            count("other")
        except BaseException as e:
            raised.append(e)
    t = threading.Thread(target=other)
    t.start()
    t.join()
    assert not raised, raised
print("one team")
"""


@pytest.mark.parametrize("method", ["upstream", "kivi"])
def test_every_call_uses_one_team(method: str, demo_model: Path, tmp_path: Path) -> None:
    """A team of its own for the prompt, and one for each thread of the caller's: 1.7 to 2 times a token's time."""
    done = run_python(TEAMS, str(demo_model), method, str(tmp_path / "state"))
    assert done.stdout == "one team\n", done.stderr[-2000:]


def workers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == NAME]


def test_calls_that_follow_each_other_are_made_by_one_thread() -> None:
    seen: list[str] = []

    def call() -> int:
        seen.append(f"{threading.current_thread().name} {threading.get_ident()}")
        return len(seen)

    assert processes.compute(call) == 1
    for _ in range(2):
        t = threading.Thread(target=processes.compute, args=(call,))
        t.start()
        t.join()
    assert processes.compute(call) == 4
    assert len(set(seen)) == 1 and seen[0].startswith(NAME)


def test_calls_at_the_same_time_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LINGER", 0.05)
    both = threading.Barrier(2, timeout=20)
    threads = [threading.Thread(target=processes.compute, args=(both.wait,)) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not both.broken
    for _ in range(200):
        if len(workers()) == 1:
            break
        time.sleep(0.02)
    assert len(workers()) == 1, "a second thread stayed"


def test_what_a_call_raises_is_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        processes.compute(lambda: 1 // 0)
    assert processes.compute(lambda: 2) == 2


@pytest.mark.parametrize("handed_over", [True, False])
def test_ctrl_c_while_a_call_is_handed_over(handed_over: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper computed already, the exception left, and the context was freed under it: signal 11."""
    submit, stop, ended = processes._submit, threading.Event(), []

    def interrupted(job: processes._Job) -> None:
        if handed_over:
            submit(job)
            while not job.claim.locked():
                time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

    def call() -> None:
        stop.wait(20)
        time.sleep(0.1)
        ended.append(stop.is_set())

    asked: list[bool] = []

    def abort(now: bool) -> None:
        asked.append(now)
        stop.set()

    monkeypatch.setattr(processes, "_submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        processes.compute(call, abort)
    assert (ended, asked) == (([True], [True, False]) if handed_over else ([], [False]))
    monkeypatch.undo()
    assert processes.compute(lambda: 3) == 3


def test_ctrl_c_within_a_token_waits_for_it(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache then holds the token: what goes on is the same text."""
    with Model(demo_model, "kivi", n_ctx=256, n_threads=1) as m:
        want = "".join(m.generate("The", max_tokens=12, temperature=0))
        decode, calls = m._libs.llama.llama_decode, []

        def slow(*args: object) -> int:
            calls.append(1)
            if len(calls) == 5:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)
            return int(decode(*args))

        monkeypatch.setattr(m._libs.llama, "llama_decode", slow)
        text = ""
        with pytest.raises(KeyboardInterrupt):
            for piece in m.generate("The", max_tokens=12, temperature=0):
                text += piece
        assert len(m.tokens) == m._libs.llama.llama_memory_seq_pos_max(m._memory, 0) + 1
        assert want.startswith(text) and len(calls) == 5
        monkeypatch.undo()
        assert "".join(m.generate("The", max_tokens=12, temperature=0)) == want


def test_the_comparison_with_the_program_runs(demo_model: Path) -> None:
    """Figures of a busy machine say nothing: that each way is measured is what this looks at."""
    script = ROOT / "scripts" / "bench_binding.py"
    argv = ["-m", str(demo_model), "--method", "kivi", "--rounds", "1", "--tokens", "8", "--prompt-tokens", "200"]
    done = subprocess.run([sys.executable, str(script), *argv, "-t", "1"], capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr[-2000:]
    for where in ("llama-completion", "main, first", "main, second", "thread, first", "thread, second"):
        assert where in done.stdout, done.stdout
