"""Watches a role from outside, through its ports, and tells what it sees as spans. The roles know nothing of it."""
