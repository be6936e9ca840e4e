"""What learns in the ranker's process: trees, or a language model. Both work in a thread and never raise.

A student that fails leaves the newest version as it is; the failure is logged and the next attempt is made on time.
"""

import random
import threading
from pathlib import Path
from typing import Protocol

import structlog

from producers.lengths.completion import Completion
from producers.lengths.language_model.examples import Example, lesson_of
from producers.lengths.language_model.store import Manifest, newest_whole, next_version, save
from producers.lengths.learned.refit import Refitter
from producers.lengths.learning import LearnedLengths
from producers.lengths.settings import LengthSettings
from schemas.errors import SettingsError
from schemas.settings import LoopSettings

log = structlog.get_logger()


class Student(Protocol):
    """Learns completions, and writes a newer version of its model every so often."""

    def close(self) -> None:
        """Give up what is under way, as soon as that can be."""
        ...

    def observe(self, completion: Completion) -> None:
        """Learn a finished completion."""
        ...

    def hold(self, held: bool) -> None:
        """Make no versions while held."""
        ...

    def wait(self) -> None:
        """Until nothing is under way."""
        ...


def build_student(settings: LengthSettings, loop: LoopSettings) -> Student:
    """The student of the predictor that the settings name.

    Raises:
        SettingsError: that predictor has no model, or there is nothing that a language model could start from.
    """
    if settings.predictor == "learned":
        return TreeStudent(settings, loop)
    if settings.predictor == "language_model" and settings.model_dir is not None:
        return LanguageStudent(settings, settings.model_dir)
    raise SettingsError(f"expected lengths.predictor learned or language_model for a ranker, got {settings.predictor}")


class TreeStudent:
    """The predictor that fits in a thread, with nobody who asks it."""

    def __init__(self, settings: LengthSettings, loop: LoopSettings) -> None:
        self._predictor = LearnedLengths(settings.model_copy(update={"refit": "thread", "buckets": "fixed"}), loop)

    def observe(self, completion: Completion) -> None:
        """Learn a finished completion."""
        self._predictor.observe(completion)

    def hold(self, held: bool) -> None:
        """Make no versions while held."""
        self._predictor.hold_fits(held)

    def wait(self) -> None:
        """Until nothing is under way."""
        self._predictor.wait()

    def close(self) -> None:
        """Trees are fitted within seconds; nothing to give up."""


class LanguageStudent:
    """Fine-tunes the newest version for some seconds on a sample of the recent past."""

    def __init__(self, settings: LengthSettings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        if newest_whole(folder) is None and settings.base_model is None:
            raise SettingsError(
                f"expected a language model in {folder} (lengths.model_dir), got none: make one with "
                "`streamrl lengths fit`, or name lengths.base_model"
            )
        self._held = False
        self._since_fit = 0
        self._newest = 0
        self._examples: list[Example] = []
        self._random = random.Random(0)
        self._refitter = Refitter()
        self._closing = threading.Event()

    def observe(self, completion: Completion) -> None:
        """Learn a finished completion; once the memory is full, a random older one leaves."""
        self._newest = max(self._newest, completion.version)
        example = Example(completion.prompt.text, completion.prompt.dataset, completion.length)
        if len(self._examples) < self._settings.memory:
            self._examples.append(example)
        else:
            self._examples[self._random.randrange(len(self._examples))] = example
        self._since_fit += 1
        patience = min(self._settings.refit_every, max(self._settings.learn_after, len(self._examples) // 2))
        if not self._held and self._since_fit >= patience and not self._refitter.is_busy:
            self._since_fit = 0
            examples, newest = list(self._examples), self._newest
            self._refitter.start(lambda: self._fine_tune(examples, newest))

    def hold(self, held: bool) -> None:
        """Make no versions while held."""
        self._held = held

    def wait(self) -> None:
        """Until nothing is under way."""
        self._refitter.wait()

    def close(self) -> None:
        """Give up the version under way."""
        self._closing.set()

    def _fine_tune(self, examples: list[Example], newest: int) -> None:
        """In the thread: from the newest version, or the base model, to the next version."""
        from producers.lengths.language_model.network import Effort, open_regressor, train

        start, before = newest_whole(self._folder) or (self._settings.base_model, None)
        assert start is not None, "checked when built"
        lesson = lesson_of(examples, scale=None if before is None else before.scale)
        regressor = open_regressor(start)
        version = next_version(self._folder)
        effort = Effort(epochs=1e9, seconds=self._settings.refit_seconds, seed=version)
        loss = train(regressor, lesson, self._settings.quantile, effort, self._closing.is_set)
        if self._closing.is_set():
            return
        levels = {**({} if before is None else before.levels), **lesson.levels}
        about = Manifest(
            version=version, policy_version=newest, observations=len(examples), scale=lesson.scale, levels=levels
        )
        save(regressor, about, self._folder)
        log.info("language model refreshed", version=version, observations=len(examples), loss=round(loss, 4))
