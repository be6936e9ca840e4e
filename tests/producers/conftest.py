"""Fixtures of all tests below."""

from tests.producers.generation.worker_harness import make_worker

__all__ = ["make_worker"]
