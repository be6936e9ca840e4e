"""Trajectories from one process to another: through our Kafka path, a Redis stream, and JSON lines in files."""
