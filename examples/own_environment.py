"""Your own environment: a game of two turns, each of which has a reward of its own.

    python -m examples.own_environment [DIRECTORY]

The game asks for letters, and then for the same letters again. StreamRL makes one object of the class for each episode
and plays it through the run's gateway, in a process that imports the class by its path. An episode becomes one
trajectory: the tokens of the policy are trained, those of the game are not.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import streamrl
from examples.scratch import working_directory
from streamrl import EnvironmentStep, PolicyReply

STEPS = 12


def share(text: str, wanted: str) -> float:
    """The share of a text's characters that are among the wanted ones."""
    return sum(character in wanted for character in text) / max(1, len(text))


class SayItAgain:
    """Say something in letters, then say it again. Each turn is worth up to 1/2: a perfect episode is worth 1."""

    tools: Sequence[Mapping[str, Any]] = ()  # OpenAI's definitions of tools, for a model that can call them

    def __init__(self, *, longest: int = 4) -> None:
        """`longest`: an option, set by `environments.options`."""
        self.request: Mapping[str, Any] = {"max_tokens": longest}  # goes with each request to the policy
        self._first_answer: str | None = None

    async def reset(self, task: int) -> list[dict[str, str]]:
        """The first question. Equal task numbers give equal episodes: those of one task are compared as a group."""
        return [{"role": "user", "content": f"{task % 10}letters?"}]

    async def step(self, reply: PolicyReply) -> EnvironmentStep:
        """Judge an answer. After the first one, ask the second question; after the second one, end the episode."""
        if self._first_answer is None:
            self._first_answer = reply.content
            reward = share(reply.content, "abcdefghijklmnopqrstuvwxyz") / 2
            return EnvironmentStep([{"role": "user", "content": "again?"}], reward)
        return EnvironmentStep(reward=share(reply.content, self._first_answer) / 2, done=True)

    async def close(self) -> None:
        """Release what the episode holds: here, nothing."""


def main(directory: Path) -> None:
    """Play and train for a few steps, then print the reward before and after, and one episode."""
    # Imported here, because the process of the environment imports this file too and does not need it.
    from examples.tiny_model import build

    game = "examples.own_environment:SayItAgain"
    run = streamrl.run(
        {
            "run": {"name": "own-environment", "directory": str(directory), "workers": 1},
            "model": {"path": str(build(directory / "model"))},
            "data": {"requests_only": True},  # there are no prompts, only episodes
            "gateway": {"enabled": True},
            "environments": {"names": [game], "options": {game: {"longest": 6}}},
            # Four tasks a step, eight episodes of each.
            "loop": {"groups_per_step": 4, "num_generations": 8, "max_staleness": 2, "max_completion_length": 32},
            "generation": {"max_num_seqs": 32},
            "training": {"max_steps": STEPS, "learning_rate": 1e-2, "threads": 1},
        }
    )

    first, *_, last = run.metrics.to_pylist()
    print(f"\nmean reward of an episode: {first['reward']:.3f} -> {last['reward']:.3f}, in {run.directory}")
    episode = run.trajectories().to_pylist()[-1]
    turns = ", ".join(f"{turn['start']} to {turn['end']}" for turn in episode["turns"])
    print(f"the last episode: {episode['prompt']} {episode['completion']}, of which the policy sampled tokens {turns}")


if __name__ == "__main__":
    with working_directory() as scratch:
        main(scratch)
