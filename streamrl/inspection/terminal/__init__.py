"""`streamrl top`: shows a run in a terminal. It only reads."""
