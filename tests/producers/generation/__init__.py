"""Tests of producers.generation."""
