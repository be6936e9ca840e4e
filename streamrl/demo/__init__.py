"""The demo: a tiny character-level model that finds out by itself that working a sum out pays."""
