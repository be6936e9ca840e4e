"""Bytes: typed arrays, the frame codec and the topic catalogue."""
