"""LoRA adapters: which there are, which workers have them, and how all workers come to have the same."""
