"""The protocols that the rooms are written against, and the in-memory twin of the bus."""
