"""The priority of processes that only look at a run. Knows no run."""

import os

NICENESS = 19


def give_way() -> None:
    """Leave the processors to the run: from now on this process takes what nobody else wants."""
    os.nice(NICENESS)
