"""The engine requests a client request is split into, and the outputs that are merged again."""
