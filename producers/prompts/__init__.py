"""Where prompts come from: reasoning-gym data sets and jsonl files, read by position."""
