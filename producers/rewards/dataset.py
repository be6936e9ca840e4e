"""The scorer that a reasoning-gym data set brings along; runs in the reward process only."""

import warnings
from functools import cache

from producers.prompts.entries import scoring_entry
from producers.prompts.sources.gym import GymDataset, open_dataset
from producers.rewards.loading import Task


@cache
def _dataset(name: str) -> GymDataset:
    return open_dataset(name, {}, size=1)


def warm_up() -> None:
    """Import the library, which takes seconds, before the first completion waits for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym  # noqa: F401


def score(task: Task) -> list[float]:
    """The score of one completion, 0 to 1, in a list as a reward function returns it.

    Raises:
        DataError: the prompt's data set is not one of reasoning-gym's.
        ValueError: the prompt lacks the columns that the scorer needs.
    """
    dataset, columns = _dataset(task["dataset"]), task["columns"]
    if "answer" not in columns or "metadata" not in columns:
        raise ValueError(f"expected columns 'answer' and 'metadata', got {sorted(columns)}")
    return [dataset.score_answer(answer=task["text"], entry=scoring_entry(columns))]
