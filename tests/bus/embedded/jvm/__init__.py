"""Tests of the broker's Java side."""
