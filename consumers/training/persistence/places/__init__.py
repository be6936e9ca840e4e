"""Kinds of places that keep checkpoints: a local directory, and an object store."""
