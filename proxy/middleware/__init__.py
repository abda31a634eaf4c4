"""Around vLLM's application: who may ask, what a request may expect, and the status line and errors of the reply."""
