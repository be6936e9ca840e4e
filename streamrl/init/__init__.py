"""The first minutes with a task of one's own: files to begin with, and the checks before a run starts."""
