"""An index of a run's records by name: a fold of its topics in a file, which can be deleted at any time."""
