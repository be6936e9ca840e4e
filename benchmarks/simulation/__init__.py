"""The published experiments, and larger ones, with the project's own decisions on a virtual clock."""
