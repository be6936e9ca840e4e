"""Tests of the embedded broker."""
