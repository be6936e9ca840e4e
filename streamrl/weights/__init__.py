"""Weights from trainer to workers: the store, the chain of relays, and how a worker fetches and adopts versions."""
