"""What happens before the first process starts: reading the configuration and checking it against this machine."""
