"""Measurements of the running system against its peers; nothing here is imported by the system."""
