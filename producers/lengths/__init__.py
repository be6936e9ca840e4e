"""Estimates of output length: advice for buckets and load, never needed for correctness."""
