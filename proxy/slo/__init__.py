"""SLO classes: which one a request belongs to, how it fared, and the metrics of both."""
