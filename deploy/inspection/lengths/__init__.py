"""`streamrl lengths`: rankers fitted to recorded trajectories."""
