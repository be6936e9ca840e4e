"""Measures how long decoding, training and moving weights take on this hardware, and keeps it as a profile."""
