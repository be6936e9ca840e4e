"""`streamrl doctor`: what may keep a run from working, and how to mend it."""
