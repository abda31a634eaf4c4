"""`twinpool lab simulate`: the proxy's real scheduler against workers of any number that exist only as time."""
