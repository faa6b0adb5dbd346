"""`ggml-kvq eval`: measure KV caches against f16 on a text, on retrieval tasks, on long generation and on documents."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import KvqError, LibraryError
from ..evaluate import documents, drift, perplexity, results, retrieval, specs, tasks

HELP = "measure quality: perplexity, KL divergence, retrieval, drift, documents"
EPILOG = """\
caches (--cache, repeatable):
  f16                              upstream's f16 cache, the reference (always measured)
  upstream:q4_0/q4_0               upstream's cache types for K and V
  kivi:bits=2,group=32             a method and its options (`ggml-kvq methods`)
  aqua:predictor=full@calib.gguf   ... with calibrated data
  name=kivi:bits=2                 any of them under a name of your own

example:
  ggml-kvq eval -m model.gguf --cache upstream:q4_0 --cache kivi:bits=2 -f text.txt -c 2048 -ub 128 -o results.jsonl
"""


def register(subparsers: Any) -> None:
    """Add the `eval` parser; its `run` default is the entry point."""
    p = subparsers.add_parser(
        "eval", help=HELP, description=HELP, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("-m", "--model", required=True, help="GGUF model, or hf:owner/repo/file.gguf")
    p.add_argument("--cache", action="append", default=[], metavar="SPEC", help="a cache to measure; repeatable, see below")
    p.add_argument("-o", "--output", default="results.jsonl", help="result file; rows already there are not measured again")
    p.add_argument("-t", "--threads", type=int, default=os.cpu_count(), help="CPU threads (default: all)")
    p.add_argument("-ub", "--ubatch-size", type=int, default=512, help="tokens decoded at once (default 512)")
    p.add_argument("--markdown", action="store_true", help="print the summary as Markdown")
    p.add_argument("--quiet", action="store_true", help="no progress bar")

    g = p.add_argument_group("text: perplexity and divergence, as llama-perplexity defines them")
    g.add_argument("-f", "--file", help="text file; without it this part is left out")
    g.add_argument("-c", "--ctx-size", type=int, default=2048, help="window in tokens (default 2048)")
    g.add_argument("--stride", type=int, default=0, help="start a window every N tokens, score its last N (default 0: end to end)")
    g.add_argument("--chunks", type=int, default=0, help="at most so many windows (default 0: all)")
    g.add_argument("--base", help="file of the f16 log-probabilities (llama-perplexity's format; default: beside the output)")

    g = p.add_argument_group("retrieval tasks")
    g.add_argument("--tasks", default="", help=f"comma list of {','.join(tasks.TASKS)}")
    g.add_argument("--lengths", default="1000,2000,4000", help="prompt lengths in tokens (default 1000,2000,4000)")
    g.add_argument("--samples", type=int, default=50, help="samples a cell (default 50)")
    g.add_argument("--seed", type=int, default=0, help="first seed of the samples (default 0)")
    g.add_argument("--filler", help="text file to hide the facts in (default: made-up sentences)")

    g = p.add_argument_group("long generation")
    g.add_argument("--drift", type=int, default=0, metavar="N", help="generate N tokens with f16 and follow them (2048 is usual)")
    g.add_argument("--prompt", default="The", help="prompt of the long generation")

    g = p.add_argument_group("documents")
    g.add_argument("--documents", help="LongBench- or RULER-style .jsonl file or folder")
    g.add_argument("--format", choices=documents.FORMATS, help="format of the documents (default: by their keys)")
    g.add_argument("--max-tokens", type=int, default=64, help="answer length in tokens (default 64)")
    g.add_argument("--max-documents", type=int, default=0, help="at most so many documents (default 0: all)")
    p.set_defaults(run=run)


class Evaluation:
    """One run: the parsed arguments, the caches, the result file."""

    def __init__(self, args: argparse.Namespace) -> None:
        from .. import hub

        self.args = args
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
        self.results = results.ResultFile(args.output)
        self.rows: list[results.Row] = []

    # ------------------------------------------------------------ shared parts

    def key(self, kind: str, cache: specs.CacheSpec, **params: Any) -> results.Row:
        config = results.fingerprint(cache.config) if cache.config else None
        body = cache.text.split("=", 1)[1] if cache.text.startswith(f"{cache.label}=") else cache.text
        return {
            "kind": kind,
            "cache": cache.label,
            "spec": body,
            "config": config,
            "model": self.model_path.name,
            "model_hash": results.fingerprint(self.model_path),
            "n_ubatch": self.args.ubatch_size,
            **params,
        }

    def open(self, cache: specs.CacheSpec, n_ctx: int) -> Any:
        ub = min(self.args.ubatch_size, n_ctx)
        return cache.open(self.model_path, n_ctx=n_ctx, n_batch=ub, n_ubatch=ub, n_threads=self.args.threads)

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
            "bits_no_window": sealed * 16 / s["bytes_f16"] if sealed else s["bits"],
            "bytes_total": s["bytes_total"],
            "bytes_f16": s["bytes_f16"],
        }

    def measure(
        self, key: results.Row, cache: specs.CacheSpec, n_ctx: int, n_steps: int, work: Callable[[Any, Any], results.Row]
    ) -> None:
        """Run `work(model, progress)` unless the row exists; a cache that this model cannot have becomes a refused row."""
        row = self.results.get(key)
        if row is None:
            label = " ".join(str(key[k]) for k in ("cache", "kind", "task", "n_tokens") if k in key)
            with Bar(label, n_steps, self.args.quiet) as bar:
                try:
                    model = self.open(cache, n_ctx)
                except LibraryError:
                    raise
                except KvqError as e:
                    row = self.results.add(key, {"refused": str(e)})
                else:
                    with model:
                        values = work(model, bar)
                        row = self.results.add(key, {**self.facts(model), **values})
        self.rows.append(row)

    # ------------------------------------------------------------ the four parts

    def text(self) -> None:
        a = self.args
        protocol = perplexity.Protocol(a.ctx_size, a.ubatch_size if a.ubatch_size < a.ctx_size else a.ctx_size, a.stride, a.chunks)
        text = Path(a.file).read_text(encoding="utf-8")
        params = {"text": Path(a.file).name, "text_hash": results.fingerprint(a.file), "n_ctx": a.ctx_size, "stride": a.stride, "chunks": a.chunks}
        keys = [(c, self.key("text", c, **params)) for c in self.caches]
        reference = next(c for c in self.caches if c.is_reference)
        base: perplexity.BaseFile | None = None
        if any(self.results.get(k) is None for _, k in keys):
            with self.open(reference, a.ctx_size) as model:
                windows = protocol.windows(perplexity.text_tokens(model, text))
                tag = hashlib.sha256(results.key_of(self.key("base", reference, **params)).encode()).hexdigest()[:12]
                path = Path(a.base) if a.base else Path(a.output).with_suffix(f".{tag}.base")
                base = perplexity.BaseFile(path, protocol, windows, model.n_vocab)
                if not base.complete():
                    if a.base and path.exists():
                        raise KvqError(f"{path} holds another text, window or model; remove it or give another --base")
                    with Bar("f16 base", len(windows), a.quiet) as bar:
                        base.write(model, bar)
        for cache, key in keys:

            def work(model: Any, bar: Any) -> results.Row:
                assert base is not None
                return perplexity.divergence(model, base, bar).summary()

            self.measure(key, cache, a.ctx_size, len(base.windows) if base else 1, work)
        if base is not None and not a.base:
            base.path.unlink(missing_ok=True)

    def retrieval(self) -> None:
        a = self.args
        chosen = [t for t in a.tasks.split(",") if t]
        for t in chosen:
            if t not in tasks.TASKS:
                raise KvqError(f"--tasks {t} is unknown; choose from {','.join(tasks.TASKS)}")
        lengths = [int(n) for n in a.lengths.split(",")]
        filler = tasks.text_filler(a.filler) if a.filler else None
        name = results.fingerprint(a.filler) if a.filler else "built-in"
        for cache in self.caches:
            for n_tokens in lengths:
                for task in chosen:
                    key = self.key("retrieval", cache, task=task, n_tokens=n_tokens, samples=a.samples, seed=a.seed, filler=name)

                    def work(model: Any, bar: Any, task: str = task, n_tokens: int = n_tokens) -> results.Row:
                        return retrieval.run_cell(
                            model, task, n_tokens, a.samples, filler=filler, n_ubatch=model.n_ubatch, seed=a.seed, progress=bar
                        )

                    self.measure(key, cache, pad(n_tokens), a.samples, work)

    def drift(self) -> None:
        a = self.args
        protocol = drift.DriftProtocol(a.prompt, a.drift, n_ubatch=a.ubatch_size)
        keys = [(c, self.key("drift", c, **protocol.key())) for c in self.caches]
        if all(self.results.get(k) for _, k in keys):
            self.rows += [r for _, k in keys if (r := self.results.get(k))]
            return
        reference = next(c for c in self.caches if c.is_reference)
        n_ctx = 0
        tag = hashlib.sha256(results.key_of(self.key("base", reference, **protocol.key())).encode()).hexdigest()[:12]
        path = Path(a.output).with_suffix(f".{tag}.drift.npz")
        with reference.open(self.model_path, n_ctx=256) as model:
            n_ctx = pad(len(model.tokenize(a.prompt, add_bos=True)) + a.drift)
        if not path.exists():
            with self.open(reference, n_ctx) as model, Bar("f16 generation", a.drift, a.quiet) as bar:
                drift.write_reference(path, model, protocol, bar)
        for cache, key in keys:
            self.measure(key, cache, n_ctx, 2 * a.drift, lambda model, bar: drift.drift(model, path, protocol, bar))
        path.unlink(missing_ok=True)

    def documents(self) -> None:
        a = self.args
        docs = list(documents.read(a.documents, a.format))
        docs = docs[: a.max_documents] if a.max_documents else docs
        source = Path(a.documents)
        digest = hashlib.sha256("".join(d.prompt for _, d in docs).encode()).hexdigest()[:16]
        for cache in self.caches:
            key = self.key(
                "documents", cache, source=source.name, documents_hash=digest, n_ctx=a.ctx_size, max_tokens=a.max_tokens, n=len(docs)
            )
            self.measure(
                key, cache, a.ctx_size, len(docs), lambda model, bar: documents.run(model, docs, max_tokens=a.max_tokens, progress=bar)
            )


class Bar:
    """A tqdm bar that is called with the number of finished steps."""

    def __init__(self, label: str, total: int, quiet: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, desc=label, disable=quiet or not sys.stderr.isatty(), leave=False, dynamic_ncols=True)

    def __call__(self, n: int) -> None:
        self._bar.update(n)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def pad(n_tokens: int) -> int:
    """Context length that holds n_tokens: the next multiple of 256, as llama.cpp pads its cache."""
    return -(-n_tokens // 256) * 256


def summary(rows: list[results.Row], markdown: bool = False) -> str:
    """Tables of all measured rows, one per kind."""
    parts = []
    text = [r for r in rows if r["key"]["kind"] == "text"]
    if text:
        parts.append(
            results.table(
                ["cache", "bits", "PPL", "KLD mean", "median", "99 %", "same top"],
                [
                    [r["key"]["cache"], "refused", *[""] * 5]
                    if "refused" in r
                    else [
                        r["key"]["cache"],
                        f"{r['bits']:.2f}",
                        f"{r['ppl']:.4f}",
                        f"{r['kld_mean']:.5f}",
                        f"{r['kld_median']:.5f}",
                        f"{r['kld_p99']:.4f}",
                        f"{100 * r['same_top']:.2f} %",
                    ]
                    for r in text
                ],
                markdown=markdown,
            )
        )
    cells = [r for r in rows if r["key"]["kind"] == "retrieval"]
    if cells:
        columns = list(dict.fromkeys((r["key"]["task"], r["key"]["n_tokens"]) for r in cells))
        labels = list(dict.fromkeys(r["key"]["cache"] for r in cells))
        value = {(r["key"]["cache"], r["key"]["task"], r["key"]["n_tokens"]): f"{r['accuracy']:.3f}" if "accuracy" in r else "refused" for r in cells}
        parts.append(
            results.table(
                ["accuracy", *[f"{t} {n}" for t, n in columns]],
                [[label, *[value.get((label, t, n), "") for t, n in columns]] for label in labels],
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
                        f"{r['kld_mean']:.5f}",
                        f"{r['kld_by_part'][0]:.5f}",
                        f"{r['kld_by_part'][-1]:.5f}",
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
                [[r["key"]["cache"], f"{r['bits']:.2f}", f"{r['score']:.4f}", str(r["n"]), str(r["n_cut"])] for r in docs],
                markdown=markdown,
            )
        )
    refused = [f"refused: {r['key']['cache']}: {r['refused']}" for r in rows if "refused" in r]
    return "\n\n".join(parts) + ("\n\n" + "\n".join(dict.fromkeys(refused)) if refused else "")


def run(args: argparse.Namespace) -> int:
    """Run the parts asked for and print the summary; 0 on success. Raises KvqError."""
    if not (args.file or args.tasks or args.drift or args.documents):
        raise KvqError("nothing to measure; give -f TEXT, --tasks LIST, --drift N or --documents PATH")
    evaluation = Evaluation(args)
    for wanted, part in (
        (args.file, evaluation.text),
        (args.tasks, evaluation.retrieval),
        (args.drift, evaluation.drift),
        (args.documents, evaluation.documents),
    ):
        if wanted:
            part()
    print(summary(evaluation.rows, args.markdown))
    return 0
