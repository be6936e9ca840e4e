"""Container images, and the programs that they need in addition to a run's processes."""
