"""What a worker has in hand and has done so far; heartbeats read it."""

from dataclasses import dataclass


@dataclass
class Load:
    """``generating`` counts completions in the engine (running or waiting there); the others count since the start."""

    generating: int = 0
    generated_tokens: int = 0
    finished_trajectories: int = 0
