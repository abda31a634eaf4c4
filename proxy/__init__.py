"""The proxy: vLLM's API server over both pools. It places, hands over, retries and aborts; it does no torch work."""
