"""Hostile bytes: bombs with measured memory, generated inputs, and coverage-guided fuzzing."""
