"""What a report shows, as plain data for its page: curves, timelines, shares, tables."""
