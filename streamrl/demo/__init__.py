"""The demo: a tiny character-level model that learns by itself to work out sums step by step."""
