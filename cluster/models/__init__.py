"""Several models behind one address: their configuration, and what is said about them over HTTP."""
