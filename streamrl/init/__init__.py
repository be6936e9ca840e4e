"""A start with a new task: the example files of `streamrl init`, and the checks before a run starts."""
