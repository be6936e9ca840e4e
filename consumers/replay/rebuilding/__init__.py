"""Computes past steps again on a scratch copy of the policy, and compares what came of them."""
