"""How much each cache costs and how far it strays from f16 on one text: bits, MiB, perplexity, KL divergence, greedy
text.

python examples/compare_methods.py [-m model.gguf] [-f text.txt] [--cache SPEC ...]
"""

import argparse
import tempfile
from pathlib import Path

from ggml_kvq import Model
from ggml_kvq.evaluate import perplexity, specs
from ggml_kvq.evaluate.tasks import default_filler

DEMO = Path(__file__).resolve().parent.parent / "models" / "kvq-demo-q8_0.gguf"

parser = argparse.ArgumentParser()
parser.add_argument("-m", "--model", default=DEMO)
parser.add_argument("-f", "--file", help="a text (default: made-up sentences)")
parser.add_argument("--cache", action="append", help="f16, upstream:q4_0, kivi:bits=2, ... (repeatable)")
parser.add_argument("-c", "--ctx-size", type=int, default=512)
parser.add_argument("--chunks", type=int, default=2)
args = parser.parse_args()

if args.file:
    text = Path(args.file).read_text(encoding="utf-8")
else:
    import random

    text = default_filler(random.Random(1), 8 * max(args.ctx_size, 512) * (args.chunks + 1))
caches = [
    specs.parse(s) for s in args.cache or ["upstream:q8_0", "upstream:q4_0", "kivi:bits=4", "kivi:bits=2", "xquant"]
]
protocol = perplexity.Protocol(args.ctx_size, 128, max_chunks=args.chunks)
size = {"n_ctx": args.ctx_size, "n_batch": 128, "n_ubatch": 128}

with tempfile.TemporaryDirectory() as folder:
    with Model(args.model, "upstream", **size) as model:
        windows = protocol.windows(perplexity.text_tokens(model, text))
        base = perplexity.BaseFile(Path(folder) / "base", protocol, windows, model.n_vocab)
        base.write(model)
    print(f"{'cache':16} {'bits':>6} {'MiB':>7} {'PPL':>9} {'KLD':>9}  greedy continuation")
    for cache in caches:
        with cache.open(args.model, **size) as model:
            stats = model.kv_stats()
            result = perplexity.divergence(model, base).summary()
            words = "".join(model.generate("The difference between", max_tokens=12, temperature=0))
            print(
                f"{cache.label:16} {stats['bits']:6.2f} {stats['bytes_total'] / 2**20:7.2f} "
                f"{result['ppl']:9.4f} {result['kld_mean']:9.5f}  {words!r}"
            )
