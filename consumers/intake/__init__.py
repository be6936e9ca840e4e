"""Trajectories topic → whole groups: decode, duplicates, staleness, assembly. Every record meets exactly one fate."""
