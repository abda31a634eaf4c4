"""Comparing what was copied with what the exporter has, block by block."""
