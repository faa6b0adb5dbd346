"""Quality of a KV cache: perplexity and divergence, retrieval, drift, documents."""
