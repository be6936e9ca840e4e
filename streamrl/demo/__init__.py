"""The demo: a tiny character-level model that learns to spell words backwards."""
