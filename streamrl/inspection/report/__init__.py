"""Reports on a run for people: summary, curves and samples on one page."""
