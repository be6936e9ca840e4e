"""Proves from topics and checkpoints that nothing is lost and nothing is trained twice."""
