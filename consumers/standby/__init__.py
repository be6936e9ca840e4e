"""A trainer that stands by for the leading one: an optional feature."""
