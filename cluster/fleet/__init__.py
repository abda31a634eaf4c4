"""Keeping the processes of a cluster's workers running: when one is started again, and by whose order."""
