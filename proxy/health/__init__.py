"""Whether the cluster gets on with its work (`/health`), and whether it can be given some (`/ready`)."""
