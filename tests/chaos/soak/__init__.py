"""A long run with a kill every few seconds; memory and file descriptors over time."""
