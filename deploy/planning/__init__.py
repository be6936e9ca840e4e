"""How many workers and trainers, with which settings, and what they deliver: predicted without running anything."""
