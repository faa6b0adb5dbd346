"""python attached_llama.py MODEL: llama-cpp-python with two methods in one process. One line of JSON."""

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


def go_on(llm: Llama, tokens: list[int]) -> str:
    llm.eval(tokens)
    out = []
    for _ in range(24):
        out.append(llm.sample(temp=0.0))
        llm.eval(out[-1:])
    return llm.detokenize(out).decode("utf-8", "replace")


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
out["halves"] = go_on(kivi, tokens[half:])
kivi.reset()
kivi.eval(kivi.tokenize(b"something else"))
kivi.load_state(state)
out["again"] = go_on(kivi, tokens[half:])
chat = kivi.create_chat_completion([{"role": "user", "content": "What is malloc?"}], max_tokens=8, temperature=0.0)
out["chat"] = chat["choices"][0]["message"]["content"]
print(json.dumps(out))
