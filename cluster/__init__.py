"""The cluster: its configuration, the messages of its processes, the launcher, and the command line."""
