"""A simulated cluster whose size the proxy's own controller decides, over a day, beside a plan that knows the day."""
