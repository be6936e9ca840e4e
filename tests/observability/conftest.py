"""Fixtures of all tests below."""

from tests.fakes.indexes import indexes_in_memory_are_closed

__all__ = ["indexes_in_memory_are_closed"]
