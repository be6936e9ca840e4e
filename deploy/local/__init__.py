"""A whole run on this machine: its processes, their supervision and its evaluation."""
