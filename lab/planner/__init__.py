"""`twinpool plan`: what a model needs on given GPUs, from its configuration alone. Only the command does I/O."""
