"""`twinpool lab run`: the same load on several ways to serve, one after the other, and a report."""
