"""Examples, each run from the root of the repository: ``python -m examples.loop``."""
