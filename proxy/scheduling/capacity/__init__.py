"""What workers have been given, how fast they are, and whom to ask first."""
