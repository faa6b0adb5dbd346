"""Read a long text once, save the compressed cache, and continue from the file in a new context.

python examples/save_restore.py [-m model.gguf] [--kv-method kivi]
"""

import argparse
import random
import tempfile
import time
from pathlib import Path

from ggml_kvq import Model
from ggml_kvq.evaluate.tasks import default_filler

DEMO = Path(__file__).resolve().parent.parent / "models" / "kvq-demo-q8_0.gguf"

parser = argparse.ArgumentParser()
parser.add_argument("-m", "--model", default=DEMO)
parser.add_argument("--kv-method", default="kivi")
args = parser.parse_args()

text = (
    default_filler(random.Random(7), 3000)
    + "\nThe secret code for Oslo is 40817.\n"
    + default_filler(random.Random(8), 1500)
)
question = "\nQuestion: What is the secret code for Oslo?\nAnswer:"

with tempfile.TemporaryDirectory() as folder:
    state = Path(folder) / "document.kvq"
    with Model(args.model, args.kv_method, n_ctx=2048) as model:
        start = time.perf_counter()
        for _ in model.feed(model.tokenize(text, add_bos=True)):
            pass
        print(f"read {len(model.tokens)} tokens in {time.perf_counter() - start:.2f} s")
        model.save_state(state)
        before = "".join(model.generate(question, reset=False, max_tokens=6, temperature=0))

    with Model(args.model, args.kv_method, n_ctx=2048) as model:
        start = time.perf_counter()
        n = model.load_state(state)
        print(f"restored {n} tokens in {time.perf_counter() - start:.2f} s")
        after = "".join(model.generate(question, reset=False, max_tokens=6, temperature=0))

print(f"answer before: {before!r}")
print(f"answer after:  {after!r}")
