"""Tests of producers.generation.engines."""
