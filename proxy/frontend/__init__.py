"""vLLM's API server on the cluster: its options, its engine client, our routes."""
