"""Bytes: the frame codec and the topic catalogue."""
