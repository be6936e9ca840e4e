"""What a running process shows of itself: metrics, traces, and one live state folded from a run's topics."""
