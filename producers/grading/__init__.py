"""Judges finished completions between workers and trainers, by members of one consumer group."""
