"""`twinpool lab load`: open-loop load on any OpenAI-compatible server, measured at the client."""
