"""Measures every link that this machine can run, beside what limits it and beside other transfer libraries."""
