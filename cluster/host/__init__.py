"""Parts of a worker host that are no conversation: when a drain is over, and what a load report says."""
