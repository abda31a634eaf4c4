"""Measures the system from outside: load, comparisons with a bare engine, reports."""
