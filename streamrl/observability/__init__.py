"""Observability of a running process: metrics, traces, log lines, and one live state folded from a run's topics."""
