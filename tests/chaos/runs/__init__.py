"""One run under test: its broker, its processes, its topics."""
