"""Metrics of a running process for Prometheus, and of a run for experiment trackers."""
