"""The `streamrl` command. Commands import heavy modules only when they run."""
