"""Reads the span files of a run back, and shows one trace as a tree."""
