"""python llama_cpp_python.py MODEL: llama-cpp-python with two methods in one process. One line of JSON."""

import json
import sys

import ggml_kvq
from llama_cpp import Llama

MODEL = sys.argv[1]
TEXT = open(sys.argv[0].rpartition("/")[0] + "/../data/walk.txt").read()[:1200]


def open_model() -> Llama:
    return Llama(MODEL, n_gpu_layers=-1, flash_attn=True, n_ctx=1024, n_threads=2, verbose=False)


def text_of(llm: Llama, prompt: object) -> str:
    return llm(prompt, max_tokens=24, temperature=0.0)["choices"][0]["text"]


out = {"own": text_of(open_model(), TEXT)}
ggml_kvq.attach(method="kivi", options={"bits": 4})
kivi = open_model()
ggml_kvq.attach(method="f16")
plain = open_model()
out["kivi"], out["f16"] = text_of(kivi, TEXT), text_of(plain, TEXT)
kivi.reset()
tokens = kivi.tokenize(TEXT.encode())
half = len(tokens) // 2
kivi.eval(tokens[:half])
state = kivi.save_state()
kivi.reset()
kivi.eval(kivi.tokenize(b"something else"))
kivi.load_state(state)
kivi.eval(tokens[half:])
again = []
for _ in range(24):
    again.append(kivi.sample(temp=0.0))
    kivi.eval(again[-1:])
out["again"] = kivi.detokenize(again).decode("utf-8", "replace")
chat = kivi.create_chat_completion([{"role": "user", "content": "What is malloc?"}], max_tokens=8, temperature=0.0)
out["chat"] = chat["choices"][0]["message"]["content"]
print(json.dumps(out))
