"""Graders: members of one consumer group that score finished completions between workers and trainers."""
