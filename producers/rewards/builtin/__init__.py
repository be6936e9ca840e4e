"""Rewards that come along, in TRL's signature, so that they can also be called from a user's own."""
