"""How weights get from a relay into an engine; knows nothing of orders and completions."""
