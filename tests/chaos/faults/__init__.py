"""What can go wrong, by name, and the schedules that seeds make of it."""
