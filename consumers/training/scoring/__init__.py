"""How likely a model finds completions."""
