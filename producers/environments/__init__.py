"""Environments: tasks of several turns, played through the gateway in processes of their own."""
