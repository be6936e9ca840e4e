"""A run that a seed stands for: who takes part, what harm is done, and how processes live and die."""
