"""``make bench-gpu``: trainer and engines on a GPU."""
