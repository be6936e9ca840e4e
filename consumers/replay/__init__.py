"""Looks at past optimizer steps again: rebuilds them in memory, from what is recorded, without touching the run."""
