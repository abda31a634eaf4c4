"""Parts of the configuration that are trees of their own."""
