"""Sources of prompts: reasoning-gym data sets and stored data sets, read by position."""
