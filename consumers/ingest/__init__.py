"""Trajectories topic → whole groups: decode, duplicates, staleness, assembly."""
