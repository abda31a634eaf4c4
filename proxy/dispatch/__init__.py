"""Takes requests, has them placed, sends their legs to workers, and gives what comes back to front ends."""
