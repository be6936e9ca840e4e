"""How fast this hardware is, and how many workers and trainers a run needs."""
