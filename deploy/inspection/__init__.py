"""Looks at a run from outside: its history on a bus or in exported files, and what is concluded from it."""
