"""What an engine's prefix cache holds, read from vLLM's KV cache events and told to the proxy."""
