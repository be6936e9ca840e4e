"""What the dispatcher reads prompts from, and which source the settings mean."""

from typing import Protocol

from producers.prompts.settings import DataSettings
from producers.prompts.sources.gym import ReasoningGymSource
from producers.prompts.sources.stored import StoredSource
from schemas.messages.prompts import Prompt


class PromptSource(Protocol):
    """Prompts by position. The cursor of a run is therefore one integer."""

    def prompt_at(self, position: int) -> tuple[Prompt, int]:
        """The prompt at a position (0, 1, 2 …) and the pass over the data it belongs to (0, 1, 2 …).

        The same settings, seed and position give the same prompt; positions never end. May block for as long as
        an entry takes to make.

        Raises:
            DataError: there is no such prompt to be had.
        """
        ...


def open_source(settings: DataSettings, *, run_seed: int = 0) -> PromptSource:
    """The source that the settings name; ``run_seed`` holds where ``data.seed`` is not given.

    Raises:
        DataError: the data set or file cannot be read, or one of its rows holds no prompt.
        SettingsError: the filter cannot be loaded.
    """
    seed = run_seed if settings.seed is None else settings.seed
    if settings.path is not None:
        return StoredSource(settings, settings.path, seed)
    return ReasoningGymSource(settings, seed)
