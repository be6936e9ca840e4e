"""Rebuilds past optimizer steps in memory, from topics and checkpoints."""
