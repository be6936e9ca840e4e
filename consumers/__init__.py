"""Trainers: they read trajectories from the bus, form micro-batches, step the optimizer and publish weights."""
