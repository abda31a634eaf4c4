"""What the API server costs in front of engines that cost nothing, beside vLLM's own and vllm-router."""
