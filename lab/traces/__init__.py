"""Public request traces, read by path. `samples/` holds tiny ones in the same formats, made up for tests and trials."""
