"""What the proxy keeps of each request on its way: where it comes from, its siblings, its legs' ids, its lifetime."""
