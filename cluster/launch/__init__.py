"""Processes that leave nothing behind: how they are started, and who ends them when the launcher is killed."""
