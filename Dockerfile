# llama-server with a compressed KV cache, from the wheel. No compiler is in the image.
#   scripts/build_wheels.sh --out dist cpu && docker build -t ggml-kvq .
#   docker run --rm -p 8080:8080 -v "$PWD/models:/models:ro" -e LLAMA_ARG_MODEL=/models/model.gguf -e KVQ_METHOD=kivi ggml-kvq
FROM debian:12-slim

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 kvq

COPY dist/ggml_kvq-*-manylinux*_x86_64.whl /tmp/

RUN python3 -m venv /opt/kvq \
    && /opt/kvq/bin/pip install --no-cache-dir /tmp/ggml_kvq-*.whl \
    && rm /tmp/ggml_kvq-*.whl \
    && /opt/kvq/bin/ggml-kvq doctor

ENV PATH=/opt/kvq/bin:$PATH \
    LLAMA_ARG_HOST=0.0.0.0 \
    LLAMA_ARG_PORT=8080
USER 10001
WORKDIR /home/kvq
EXPOSE 8080
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s \
    CMD ["python3", "-c", "import os, urllib.request; urllib.request.urlopen(f\"http://127.0.0.1:{os.environ['LLAMA_ARG_PORT']}/health\", timeout=4)"]
ENTRYPOINT ["llama-server"]
