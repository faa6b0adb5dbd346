"""python xllamacpp_server.py MODEL METHOD...: the text of one prompt by xllamacpp's server, for each method in turn;
`none`: its own cache. One line of JSON.
"""

import json
import sys

import ggml_kvq
import xllamacpp

MODEL, METHODS = sys.argv[1], sys.argv[2:]
TEXT = open(sys.argv[0].rpartition("/")[0] + "/../data/walk.txt").read()[:1200]
out = {}
for method in METHODS:
    if method != "none":
        name, _, bits = method.partition(":")
        ggml_kvq.attach(xllamacpp, method=name, options={"bits": bits} if bits else None)
    params = xllamacpp.CommonParams()
    params.model.path = MODEL
    params.n_ctx, params.n_parallel, params.warmup = 1024, 1, False
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    server = xllamacpp.Server(params)
    reply = server.handle_completions({"prompt": TEXT, "max_tokens": 24, "temperature": 0})
    out[method] = reply["choices"][0]["text"]
    del server
print(json.dumps(out))
