"""`streamrl top`: a run in a terminal. Reads only."""
