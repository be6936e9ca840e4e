"""Prompts that somebody has written down: jsonl files, and all that the `datasets` library reads."""
