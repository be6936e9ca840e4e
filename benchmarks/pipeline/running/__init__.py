"""Runs the real pipeline for one case, and reads back what its topics say of it."""
