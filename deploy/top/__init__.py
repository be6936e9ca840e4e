"""`streamrl top`: a run in a terminal, as often as wanted at once. Reads only; joins no group and commits nothing."""
