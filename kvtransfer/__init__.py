"""Moves paged KV blocks between engines. The core imports no vLLM; only `vllm_*` modules here touch it."""
