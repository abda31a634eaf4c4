"""A cluster that `twinpool up` started and `twinpool down` stops: what is known of it, and how it is watched."""
