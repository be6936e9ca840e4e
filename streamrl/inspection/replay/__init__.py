"""Looks at past optimizer steps again: rebuilds them in memory, from what topics and checkpoints hold."""
