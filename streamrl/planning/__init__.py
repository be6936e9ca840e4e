"""Measures how fast the hardware is, and plans how many workers and trainers a run needs."""
