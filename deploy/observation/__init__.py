"""What can be known of a run from its topics alone, for displays, reports and summaries."""
