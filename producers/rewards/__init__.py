"""Rewards: the data set's own scorer and TRL-style functions, each in a process of its own."""
