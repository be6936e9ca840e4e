"""A run as it is at this moment, folded from its topics: what the terminal view and the dashboard show."""
