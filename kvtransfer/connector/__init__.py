"""Both halves of the vLLM connector: in the engine's scheduler, and in each of its ranks."""
