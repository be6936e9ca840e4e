"""Tests of benchmarks/peers."""
