"""Computes advantages (numpy) and token losses (torch) of groups of samples. Knows no bus and no optimizer."""
