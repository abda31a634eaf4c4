"""Several models behind one address: a front that starts a cluster per model and forwards requests to it."""
