"""One evaluation run: caches x measurements, resumed from the result file, summed up in tables."""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import budget, default_means, files, gguf_header, hub, memory, methods, progress, resolver
from ..core import kvstats
from ..errors import KvqError, LabError, LibraryError
from ..lab.method import sources as lab_sources
from . import documents, drift, perplexity, results, retrieval, specs, tasks


class Evaluation:
    """One run: the parsed arguments, the caches, the result file."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        args.ubatch_size = args.ubatch_size or default_ubatch(args.ctx_size if args.file else 0)
        self.model_path = hub.resolve(args.model)
        if not self.model_path.is_file():
            raise KvqError(f"{self.model_path} is not a file; give -m a GGUF model")
        self.caches = [specs.parse(text) for text in args.cache]
        if not any(c.is_reference for c in self.caches):
            self.caches.insert(0, specs.parse("f16"))
        labels = [c.label for c in self.caches]
        for label in labels:
            if labels.count(label) > 1:
                raise KvqError(f"two caches are called {label}; name one of them, e.g. other={label}")
        for cache in self.caches:
            cache.check()
        self.reference = next(c for c in self.caches if c.is_reference)
        self.header = gguf_header.read(self.model_path, tensors=True)
        self.header.check_whole()
        self.check_bits()
        self.tasks = [task for task in args.tasks.split(",") if task]
        for task in self.tasks:
            if task not in tasks.TASKS:
                raise KvqError(f"--tasks {task} is unknown; choose from {','.join(tasks.TASKS)}")
        for path in filter(None, (args.file, args.filler, args.documents)):
            if not Path(path).exists():
                raise KvqError(f"{path} does not exist; give a text, or documents")
        self.filler = tasks.text_filler(args.filler) if args.filler else None
        docs = list(documents.read(args.documents, args.format)) if args.documents else []
        self.docs = docs[: args.max_documents] if args.max_documents else docs
        if args.documents and pad(args.ctx_size) <= args.max_tokens:
            raise KvqError(
                f"-c {args.ctx_size} has no room beside --max-tokens {args.max_tokens} for a document; raise -c"
            )
        files.probe(args.output)
        self.results = results.ResultFile(args.output)
        self.rows: list[results.Row] = []
        self.n_reused = 0

    def check_bits(self) -> None:
        """BudgetError for a number of bits that this model cannot do with."""
        facts = memory.facts(self.header)
        for cache in self.caches if facts else []:
            if cache.method == budget.METHOD and cache.config != resolver.OFF and facts:
                data = cache.config_file or default_means.there(self.model_path) or resolver.OFF
                options, _ = resolver.planned(methods.library, cache.method, cache.options, data, self.header)
                words = f"cache {cache.text!r}"
                budget.refuse_bits_below_least(
                    facts, options, words, f"write {cache.spec.partition('@')[0]},pairs=none"
                )

    # ------------------------------------------------------------ shared parts

    def key(self, kind: str, cache: specs.CacheSpec, **params: Any) -> results.Row:
        config = results.fingerprint(cache.config_file) if cache.config_file else cache.config
        more: results.Row = (
            {"lab_hash": results.fingerprint_all(lab_sources(Path(cache.lab_file)))} if cache.lab_file else {}
        )
        if not self.args.swa_full:
            more["swa_full"] = False
        return {
            "kind": kind,
            "cache": cache.label,
            "spec": cache.spec,
            "config": config or None,
            "model": self.model_path.name,
            "model_hash": results.fingerprint(self.model_path),
            "n_ubatch": self.args.ubatch_size,
            **more,
            **params,
        }

    def open(self, cache: specs.CacheSpec, n_ctx: int, key: results.Row) -> Any:
        ub = min(self.args.ubatch_size, n_ctx)
        size = {"n_ctx": n_ctx, "n_batch": ub, "n_ubatch": ub, "n_threads": self.args.threads}
        with in_flags(key):
            return cache.open(self.model_path, **size, swa_full=self.args.swa_full)

    def facts(self, model: Any) -> results.Row:
        """True bits and sizes of the open cache."""
        s = model.kv_stats()
        sealed = s.get("bytes_codes", 0) + s.get("bytes_params", 0)
        return {
            "method": s["method"],
            "options": s["options"],
            "bits": s["bits"],
            "bits_k": s["bits_k"],
            "bits_v": s["bits_v"],
            "bits_no_window": sealed * 16 / s["bytes_f16"] if sealed else s.get("bits_no_window", s["bits"]),
            "bytes_total": s["bytes_total"],
            "bytes_f16": s["bytes_f16"],
            "sealed": s.get("n_sealed"),
            "devices": model.devices,
            **({"simulated": True} if s.get("simulated") else {}),
        }

    def long_bits(self, cache: specs.CacheSpec, key: results.Row) -> results.Row:
        """True bits of this cache in a context of --bits-at tokens, which is opened and left empty; {} without. A
        second tier is counted apart.
        """
        if not self.args.bits_at:
            return {}
        with self.open(cache, self.args.bits_at, key) as model:
            s = model.kv_stats()
        far = s.get("bytes_far", 0)
        near = s["bits"] if not far else (s["bytes_total"] - far + kvstats.bytes_besides(s)) * 16 / s["bytes_f16"]
        more = {"bits_far_long": far * 16 / s["bytes_f16"]} if far else {}
        return {"n_ctx_long": self.args.bits_at, "bits_long": near, **more}

    def measure(
        self,
        key: results.Row,
        cache: specs.CacheSpec,
        n_ctx: int,
        n_steps: int,
        work: Callable[[Any, Any], results.Row],
    ) -> None:
        """Run `work(model, progress)` unless the row exists; a cache that this model cannot have becomes a refused
        row. KvqError when that cache is the reference: others would be held against nothing.
        """
        row = self.results.get(key)
        if row and "refused" in row and cache.is_reference:
            row = None
        self.n_reused += row is not None
        if row is None:
            label = " ".join(str(key[k]) for k in ("cache", "kind", "task", "n_tokens") if k in key)
            with progress.Bar(label, n_steps, self.args.quiet) as bar:
                try:
                    model = self.open(cache, n_ctx, key)
                except (LibraryError, LabError):  # no fault of the model
                    raise
                except KvqError as e:
                    if cache.is_reference:
                        raise
                    why, name = str(e), self.model_path.name
                    for path in (self.model_path, self.model_path.resolve()):
                        why = why.replace(str(path), name)
                    row = self.results.add(key, {"refused": why})
                else:
                    with model:
                        done = work(model, bar)
                        values = {**self.facts(model), **done}  # bits of the laboratory are known behind the work
                    row = self.results.add(key, {**values, **self.long_bits(cache, key)})
        self.rows.append(row)

    def check_lengths(self) -> None:
        """KvqError for a length that some sample of a task does not fit."""
        a = self.args
        if all(self.results.get(key) for *_, key in self.cells()):
            return
        with self.reference.open(self.model_path, n_ctx=256) as model:
            need, task = max(
                (tasks.least(task, seed, self.filler, lambda s: len(model.tokenize(s))), task)
                for task in self.tasks
                for seed in range(a.seed, a.seed + a.samples)
            )
        if min(a.lengths) < need:
            raise KvqError(
                f"--lengths {min(a.lengths)} is too short for --tasks {task}, which has a sample of at least {need}"
                f" tokens; give --lengths {need} or more"
            )

    def warn_beyond_training(self) -> None:
        """Say so when the model was not trained for so many tokens: f16 itself is bad there."""
        a, trained = self.args, gguf_header.trained_for(self.header)
        asked = {"-c": a.ctx_size if a.file or a.documents else 0, "--drift": a.drift}
        asked["--lengths"] = max(a.lengths) if self.tasks else 0
        for flag, n_tokens in asked.items():
            if n_tokens > trained > 0:
                print(
                    f"ggml-kvq eval: warning: {flag} {n_tokens} exceeds the {trained} tokens that the model was trained"
                    " for: f16 itself may fail there",
                    file=sys.stderr,
                )

    def warn(self, row: results.Row) -> None:
        """Say so when a row tells of the f16 window and the batch more than of codes."""
        share = row.get("read_codes")
        if share is not None and share < 0.5 and row["method"] != "f16":
            a = self.args
            print(
                f"ggml-kvq eval: warning: {row['key']['cache']}: only {100 * share:.0f} % of what was scored read"
                " codes, the rest read the f16 window and its own batch: lower -ub (now"
                f" {min(a.ubatch_size, a.ctx_size)}) or raise -c (now {a.ctx_size})",
                file=sys.stderr,
            )

    # ------------------------------------------------------------ the four parts

    def text(self) -> None:
        a = self.args
        text = files.read_text(a.file, "-f")
        params = {
            "text": Path(a.file).name,
            "text_hash": results.fingerprint(a.file),
            "n_ctx": a.ctx_size,
            "stride": a.stride,
            "chunks": a.chunks,
        }
        keys = [(c, self.key("text", c, **params)) for c in self.caches]
        with in_flags(keys[0][1]):
            protocol = perplexity.Protocol(a.ctx_size, min(a.ubatch_size, a.ctx_size), a.stride, a.chunks)
        base: perplexity.BaseFile | None = None
        if any(self.results.get(k) is None for _, k in keys):
            with self.open(self.reference, a.ctx_size, keys[0][1]) as model:
                with in_flags(keys[0][1]):
                    windows = protocol.windows(perplexity.text_tokens(model, text))
                key = self.key("base", self.reference, **params)
                tag = hashlib.sha256(results.key_of(key).encode()).hexdigest()[:12]
                path = Path(a.base) if a.base else Path(a.output).with_suffix(f".{tag}.base")
                base = perplexity.BaseFile(path, protocol, windows, model.n_vocab)
                if base.complete():
                    base.check(model)
                else:
                    if a.base and path.exists():
                        raise KvqError(f"{path} holds another text, window or model; remove it or give another --base")
                    with progress.Bar("f16 base", len(windows), a.quiet) as bar:
                        base.write(model, self.estimating(base, sum(self.results.get(k) is None for _, k in keys), bar))
        for cache, key in keys:

            def work(model: Any, bar: Any) -> results.Row:
                assert base is not None
                codes = perplexity.CodesRead()
                out = perplexity.divergence(model, base, bar, codes).summary()
                return {**out, "read_codes": codes.share() if model.kv_method else None}

            self.measure(key, cache, a.ctx_size, len(base.windows) if base else 1, work)
            self.warn(self.rows[-1])
        if base is not None and not a.base:
            base.path.unlink(missing_ok=True)

    def estimating(self, base: perplexity.BaseFile, n_caches: int, bar: progress.Bar) -> Callable[[int], None]:
        """`bar`, and before it a line: what the file of f16 distributions takes, and how long it will be, as the first
        window tells.
        """
        n, started, told = len(base.windows), time.monotonic(), [self.args.quiet]
        if not told[0]:
            windows = f"{n} window{'s' * (n > 1)} of {base.protocol.n_ctx} tokens, {n_caches} caches"
            room = f"{budget.words(base.n_bytes())} in {base.path} until the end"
            print(
                f"ggml-kvq eval: {windows}. Distributions of f16 take {room}; --chunks N reads fewer windows",
                file=sys.stderr,
            )

        def step(count: int) -> None:
            if not told[0]:
                told[0] = True
                all_of_it = (time.monotonic() - started) * n * (1 + n_caches)
                print(f"ggml-kvq eval: about {progress.span(all_of_it)} on this machine", file=sys.stderr)
            bar(count)

        return step

    def cells(self) -> Iterator[tuple[specs.CacheSpec, int, str, results.Row]]:
        """(cache, tokens, task, key) of every cell of the retrieval tasks."""
        a = self.args
        name = results.fingerprint(a.filler) if a.filler else "built-in"
        for cache in self.caches:
            for n_tokens in a.lengths:
                for task in self.tasks:
                    params = {"task": task, "n_tokens": n_tokens, "samples": a.samples, "seed": a.seed, "filler": name}
                    params |= {"chat": True} if a.chat else {}
                    yield cache, n_tokens, task, self.key("retrieval", cache, **params)

    def retrieval(self) -> None:
        a = self.args
        for cache, n_tokens, task, key in self.cells():

            def work(model: Any, bar: Any, task: str = task, n_tokens: int = n_tokens) -> results.Row:
                return retrieval.run_cell(
                    model,
                    task,
                    n_tokens,
                    a.samples,
                    filler=self.filler,
                    n_ubatch=model.n_ubatch,
                    seed=a.seed,
                    chat=a.chat,
                    progress=bar,
                )

            self.measure(key, cache, pad(n_tokens), a.samples, work)

    def drift(self) -> None:
        a = self.args
        protocol = drift.DriftProtocol(a.prompt, a.drift, n_ubatch=a.ubatch_size)
        keys = [(c, self.key("drift", c, **protocol.key())) for c in self.caches]
        if all(self.results.get(k) for _, k in keys):
            self.rows += [r for _, k in keys if (r := self.results.get(k))]
            self.n_reused += len(keys)
            return
        n_ctx = 0
        key = self.key("base", self.reference, **protocol.key())
        tag = hashlib.sha256(results.key_of(key).encode()).hexdigest()[:12]
        path = Path(a.output).with_suffix(f".{tag}.drift.npz")
        with self.reference.open(self.model_path, n_ctx=256) as model:
            n_ctx = pad(len(model.tokenize(a.prompt, add_bos=True)) + a.drift)
        if not path.exists():
            with (
                self.open(self.reference, n_ctx, keys[0][1]) as model,
                progress.Bar("f16 generation", a.drift, a.quiet) as bar,
            ):
                drift.write_reference(path, model, protocol, bar)
        for cache, key in keys:
            self.measure(key, cache, n_ctx, 2 * a.drift, lambda model, bar: drift.drift(model, path, protocol, bar))
        path.unlink(missing_ok=True)

    def documents(self) -> None:
        a = self.args
        docs = self.docs
        source = Path(a.documents)
        digest = hashlib.sha256("".join(d.prompt for _, d in docs).encode()).hexdigest()[:16]
        for cache in self.caches:
            key = self.key(
                "documents",
                cache,
                source=source.name,
                documents_hash=digest,
                n_ctx=a.ctx_size,
                max_tokens=a.max_tokens,
                n=len(docs),
            )
            self.measure(
                key,
                cache,
                a.ctx_size,
                len(docs),
                lambda model, bar: documents.run(model, docs, max_tokens=a.max_tokens, progress=bar),
            )


@contextmanager
def in_flags(key: results.Row) -> Iterator[None]:
    """Messages about a row in words of our flags: Python's arguments are no cure on a command line."""
    length = {"retrieval": "--lengths", "drift": "--drift"}.get(key["kind"])
    flag, n_tokens = (length, key["n_tokens"]) if length else ("-c", key["n_ctx"])
    try:
        yield
    except KvqError as e:
        text = re.sub(r"\bn_ctx=\d+", f"{flag} {n_tokens}", str(e))
        text = re.sub(r"\bstride=(\d+)", r"--stride \1", text.replace("n_ctx", flag))
        raise type(e)(re.sub(r"\bn_u?batch=(\d+)", r"-ub \1", text)) from e


def default_ubatch(n_ctx: int) -> int:
    """Tokens decoded at once so that most of what is scored reads codes: 128, an eighth of a short window, at least
    16.
    """
    return min(128, max(16, n_ctx // 8 // 16 * 16)) if n_ctx else 128


def pad(n_tokens: int) -> int:
    """Context length that holds n_tokens: the next multiple of 256, as llama.cpp pads its cache."""
    return -(-n_tokens // 256) * 256


def nats(value: float, digits: int) -> str:
    """A divergence; f16's own is a rounding error of either sign, and no -0.00000."""
    return f"{round(value, digits) + 0.0:.{digits}f}"


def summary(rows: list[results.Row], markdown: bool = False) -> str:
    """Tables of all measured rows, one per kind."""
    parts = []
    text = [r for r in rows if r["key"]["kind"] == "text"]
    if text:
        parts.append(
            results.table(
                ["cache", "bits", "PPL", "KLD mean", "median", "99 %", "same top", "read codes"],
                [
                    (
                        [r["key"]["cache"], "refused", *[""] * 6]
                        if "refused" in r
                        else [
                            r["key"]["cache"],
                            f"{r['bits']:.2f}",
                            f"{r['ppl']:.4f}",
                            nats(r["kld_mean"], 5),
                            nats(r["kld_median"], 5),
                            nats(r["kld_p99"], 4),
                            f"{100 * r['same_top']:.2f} %",
                            f"{100 * r['read_codes']:.0f} %" if r.get("read_codes") is not None else "",
                        ]
                    )
                    for r in text
                ],
                markdown=markdown,
            )
        )
    cells = [r for r in rows if r["key"]["kind"] == "retrieval"]
    if cells:
        columns = list(dict.fromkeys((r["key"]["task"], r["key"]["n_tokens"]) for r in cells))
        labels = list(dict.fromkeys(r["key"]["cache"] for r in cells))
        value = {
            (r["key"]["cache"], r["key"]["task"], r["key"]["n_tokens"]): (
                f"{r['accuracy']:.3f}" if "accuracy" in r else "refused"
            )
            for r in cells
        }
        parts.append(
            results.table(
                ["accuracy", *[f"{t} {n}" for t, n in columns]],
                [[label, *[value.get((label, t, n), "") for t, n in columns]] for label in labels],
                markdown=markdown,
            )
        )
        nll = {
            (r["key"]["cache"], r["key"]["task"], r["key"]["n_tokens"]): f"{r['answer_nll_mean']:.4f}"
            for r in cells
            if "answer_nll_mean" in r
        }
        if nll:
            parts.append(
                results.table(
                    ["answer NLL", *[f"{t} {n}" for t, n in columns]],
                    [[label, *[nll.get((label, t, n), "") for t, n in columns]] for label in labels],
                    markdown=markdown,
                )
            )
    long = [r for r in rows if r["key"]["kind"] == "drift" and "refused" not in r]
    if long:
        parts.append(
            results.table(
                ["long generation", "bits", "KLD mean", "first 1/8", "last 1/8", "same top", "parted at"],
                [
                    [
                        r["key"]["cache"],
                        f"{r['bits']:.2f}",
                        nats(r["kld_mean"], 5),
                        nats(r["kld_by_part"][0], 5),
                        nats(r["kld_by_part"][-1], 5),
                        f"{100 * r['same_top']:.2f} %",
                        str(r["parted_at"]),
                    ]
                    for r in long
                ],
                markdown=markdown,
            )
        )
    docs = [r for r in rows if r["key"]["kind"] == "documents" and "refused" not in r]
    if docs:
        parts.append(
            results.table(
                ["documents", "bits", "score", "n", "cut"],
                [
                    [r["key"]["cache"], f"{r['bits']:.2f}", f"{r['score']:.4f}", str(r["n"]), str(r["n_cut"])]
                    for r in docs
                ],
                markdown=markdown,
            )
        )
    refused = [f"refused: {r['key']['cache']}: {r['refused']}" for r in rows if "refused" in r]
    lab = {
        f"{r['key']['cache']}: {r['bits_no_window']:.2f} bits as its class says, the rest are window and tables"
        for r in rows
        if "lab_hash" in r["key"] and "bits_no_window" in r
    }
    notes = [*sorted(lab), *dict.fromkeys(refused)]
    return "\n\n".join(parts) + ("\n\n" + "\n".join(notes) if notes else "")


def run(args: argparse.Namespace) -> int:
    """Run the parts asked for and print the summary; 0 on success. Raises KvqError."""
    if not (args.file or args.tasks or args.drift or args.documents):
        raise KvqError("nothing to measure; give -f TEXT, --tasks LIST, --drift N or --documents PATH")
    evaluation = Evaluation(args)
    with files.alone(args.output, "ggml-kvq eval"):
        evaluation.results = results.ResultFile(args.output)  # another run may just have ended
        evaluation.check_lengths()
        evaluation.warn_beyond_training()
        for wanted, part in (
            (args.file, evaluation.text),
            (args.tasks, evaluation.retrieval),
            (args.drift, evaluation.drift),
            (args.documents, evaluation.documents),
        ):
            if wanted:
                part()
    if evaluation.n_reused:
        print(
            f"ggml-kvq eval: reused {evaluation.n_reused} rows of {args.output}, measured"
            f" {len(evaluation.rows) - evaluation.n_reused}",
            file=sys.stderr,
        )
    print(summary(evaluation.rows, args.markdown))
    asked = [r for r in evaluation.rows if r["key"]["spec"] != "f16"]
    return 1 if asked and all("refused" in r for r in asked) else 0
