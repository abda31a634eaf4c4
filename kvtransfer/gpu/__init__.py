"""The GPU side of a rank: its device, the thread that drives it, the copy kernel. Only `device.py` knows cupy."""
