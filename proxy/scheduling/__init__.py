"""Where a request goes. Pure and deterministic: no sockets, no clock, no logging; `lab` runs the same code."""
