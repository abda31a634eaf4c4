"""What the load generator itself adds: hundreds of streams from a server that knows when it sent each token."""
