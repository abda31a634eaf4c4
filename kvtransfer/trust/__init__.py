"""Who may connect to a socket that others on the network can reach."""
