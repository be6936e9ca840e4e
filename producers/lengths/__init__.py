"""Estimates of output length, for buckets and load balancing; correctness never depends on them."""
