"""Standby trainers, which take over from a silent leading trainer: an optional feature."""
