"""Audit and export as commands: what they open, how they show it, and how they end."""
