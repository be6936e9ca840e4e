"""Where each record of a run stands, by name: a fold of its topics in a file that can be thrown away at any time."""
