"""The dead letters of a run: what was refused, why, and how to send it once more."""
