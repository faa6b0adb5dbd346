"""Stream text with a compressed KV cache.

python examples/generate.py [-m model.gguf] [--kv-method xquant] [--kv-opt window=64] [PROMPT]
"""

import argparse
from pathlib import Path

from ggml_kvq import Model

DEMO = Path(__file__).resolve().parent.parent / "models" / "kvq-demo-q8_0.gguf"

parser = argparse.ArgumentParser()
parser.add_argument("prompt", nargs="?", default="The KV cache of a language model holds")
parser.add_argument("-m", "--model", default=DEMO, help="GGUF file or hf:owner/repo/file.gguf")
parser.add_argument("--kv-method", default="xquant")
parser.add_argument("--kv-opt", action="append", default=[], metavar="KEY=VALUE")
parser.add_argument("-n", "--max-tokens", type=int, default=64)
parser.add_argument("--temperature", type=float, default=0.7)
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()

with Model(args.model, args.kv_method, ",".join(args.kv_opt), n_ctx=2048) as model:
    print(args.prompt, end="", flush=True)
    for piece in model.generate(args.prompt, max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed):
        print(piece, end="", flush=True)
    stats = model.kv_stats()
print(
    f"\n[{stats['method']}: {stats['bits']:.2f} true bits, {stats['bytes_total'] / 2**20:.2f} MiB instead of"
    f" {stats['bytes_f16'] / 2**20:.2f}]"
)
