"""The model of a KV transfer between simulated workers."""
