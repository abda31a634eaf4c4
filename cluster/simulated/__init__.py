"""Workers with the real wire protocol and a cost model in place of the engine (`engine: simulated`)."""
