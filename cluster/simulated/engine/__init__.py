"""The model of an engine: pure code, to which every time is passed in."""
