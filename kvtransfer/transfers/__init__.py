"""What becomes of a transfer, at its exporter and at its importer: pure state, no I/O."""
