"""What `twinpool` shows: stages of the start, tables, the demonstration."""
