"""Watches the balance of generation and training, and says how many workers are wanted."""
