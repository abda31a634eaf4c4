"""Ways for bytes to get from one rank's blocks into another's, and the choice between them."""
