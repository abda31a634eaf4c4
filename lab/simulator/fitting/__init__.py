"""The simulator's costs from a measured run, and how well they foretell another one."""
