"""Looks at a running run from outside, through its broker: records, standing, lag, and whether all is well."""
