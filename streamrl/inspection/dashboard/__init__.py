"""`streamrl ui`: a run in a browser. Reads only, but for dead letters that are sent once more."""
