"""Which workers there are, and the one socket that connects them."""
