"""Talk to a model through its chat template; the conversation stays in the compressed cache between turns.

python examples/chat.py [-m model.gguf] [--kv-method kivi]        (end with an empty line)
"""

import argparse
import sys
from pathlib import Path

from ggml_kvq import Model

DEMO = Path(__file__).resolve().parent.parent / "models" / "kvq-demo-q8_0.gguf"

parser = argparse.ArgumentParser()
parser.add_argument("-m", "--model", default=DEMO)
parser.add_argument("--kv-method", default="kivi")
parser.add_argument("-n", "--max-tokens", type=int, default=128)
parser.add_argument("--temperature", type=float, default=0.7)
args = parser.parse_args()

with Model(args.model, args.kv_method, n_ctx=4096) as model:
    messages: list[dict[str, str]] = []
    known = ""  # template text that the cache already holds
    while True:
        print("> ", end="", flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            break
        messages.append({"role": "user", "content": line})
        prompt = model.chat_prompt(messages)
        # the template usually only grows: feed the new end, or start over when it rewrote the past
        grows = prompt.startswith(known) and bool(known)
        reply = ""
        for piece in model.generate(
            prompt[len(known) :] if grows else prompt,
            reset=not grows,
            special=True,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
        ):
            reply += piece
            print(piece, end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": reply})
        known = prompt + reply
