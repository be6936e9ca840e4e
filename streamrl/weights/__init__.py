"""Weights on their way: the store, the chain of relays, and how a worker fetches and adopts them."""
