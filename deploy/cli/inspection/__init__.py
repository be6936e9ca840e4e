"""Commands that look at a run from outside: its books, its dead letters, its past steps."""
