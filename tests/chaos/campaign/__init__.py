"""The long form of the chaos suite: many runs, many seeds, one file of results."""
