"""The first minutes with a task of one's own: files to begin with, and a check of everything before a run."""
