"""vLLM's API server around the cluster."""
