"""What is left of a run for people to read: summary, curves and samples on one page."""
