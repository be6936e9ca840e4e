"""What lengths are measured by: recent quantiles, buckets, and scores of an order."""
