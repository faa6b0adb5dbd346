"""llama-cpp-python with its KV cache in 4 bits: python examples/llama_cpp_python.py MODEL.gguf"""

import sys

import ggml_kvq
from llama_cpp import Llama

ggml_kvq.attach(method="kivi", options={"bits": 4})
llm = Llama(sys.argv[1], n_gpu_layers=-1, flash_attn=True, n_ctx=2048, verbose=False)
reply = llm.create_chat_completion([{"role": "user", "content": "What is malloc?"}], max_tokens=32)
print(reply["choices"][0]["message"]["content"])
