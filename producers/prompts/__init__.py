"""Where prompts come from: reasoning-gym data sets and stored ones, read by position."""
