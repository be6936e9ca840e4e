"""Groups of trajectories → micro-batches of plain arrays, cut by a token budget as they arrive. Knows no torch."""
