"""Requests that wait: their order, how many there may be, and what becomes of those that cannot be in time."""
