"""Real processes killed in the middle of many completions, and the proof that others finished them."""
