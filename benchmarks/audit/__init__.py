"""How long `streamrl audit` takes, and how much memory, on a run of a given size."""
