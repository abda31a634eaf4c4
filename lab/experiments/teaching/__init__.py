"""Ways to serve that nobody should use: they show why batching, a KV cache and continuous batching exist."""
