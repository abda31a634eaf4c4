"""Workers on the nodes of a Ray cluster: their room, their start, their end. Only files named `ray_*.py` import Ray."""
