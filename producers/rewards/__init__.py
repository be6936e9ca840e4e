"""Rewards: the data set's own scorer and TRL-style functions, each in its own process."""
