"""How a command line names settings."""
