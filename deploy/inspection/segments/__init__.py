"""A run's topics as files that can be read without a broker: parquet or JSON lines, and a manifest."""
