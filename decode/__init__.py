"""The decode room."""
