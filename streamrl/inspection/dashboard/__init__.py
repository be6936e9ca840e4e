"""`streamrl ui`: shows a run in a browser. It only reads, except that it can retry dead letters."""
