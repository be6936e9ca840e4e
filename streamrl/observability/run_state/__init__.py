"""A run as it is at this moment, folded from its topics: what terminal, dashboard and progress lines show."""
