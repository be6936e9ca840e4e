"""A whole run on this machine: its processes, their supervision, its evaluation."""
