"""A run's directory as a report needs it: rows of metrics, settings, and the figures at its end."""
