"""Tests of producers.generation.engines.slots."""
