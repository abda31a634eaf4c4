"""The state machine of one request: what can happen to it, and what must be done then. Pure."""
