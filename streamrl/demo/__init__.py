"""The demo: a tiny character-level model discovers that it should work out sums step by step."""
