"""Proves from topics and checkpoints that no record is lost or trained twice."""
