"""Sends prompts to workers: admission by staleness, the fleet, the choice of a worker, and recovery."""
