"""Further API server processes over one dispatcher: what they say, where they connect, how they are started."""
