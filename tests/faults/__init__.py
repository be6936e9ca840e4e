"""Faults between a client and a real broker, and what comes of them."""
