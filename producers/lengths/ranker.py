"""The ranker's loop: reads the trajectories as a group of its own, so that its student makes newer models of lengths.

Invariants, each with a test of its name:
- nobody_waits_for_the_ranker: predictors take models from a folder when there are newer ones; without a ranker they go
  on with what they have;
- the_past_makes_no_version: after a restart, models are made only once everything is read that was there at the start.
"""

import asyncio
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog

from bus.port import Bus, Record, Subscription, TopicPartition
from producers.lengths.estimators import Completion
from producers.lengths.language_model import Example, lesson_of
from producers.lengths.learned.model import Refitter
from producers.lengths.learned.predictor import LearnedLengths
from producers.lengths.model_store import Manifest, newest_whole, next_version, save
from producers.lengths.settings import LengthSettings
from schemas.control import RunFinished
from schemas.errors import SettingsError, WireError
from schemas.messages import Message
from schemas.settings import LoopSettings
from schemas.topics import CONTROL, TRAJECTORIES
from schemas.trajectories import FinishReason, Trajectory

# What learns in the ranker's process: trees, or a language model. Both work in a thread and never raise. A student
# that fails leaves the newest version as it is; the failure is logged and the next attempt is made on time.

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
        from producers.lengths.language_model import Effort, open_regressor, train

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


CLIENT_ID = "ranker"
POLL_S = 0.5
COMMIT_S = 5.0
REMEMBERED = 100_000
"""Trajectories, the newest, that are recognised when they are read again."""


@dataclass
class Ranker:
    """One per run; a second one does no harm but to the versions' numbers. ``on_tick`` is told of every turn."""

    bus: Bus
    run_name: str
    student: Student
    clock: Callable[[], float] = time.time
    on_tick: Callable[[str], None] = lambda name: None
    learned: int = field(default=0, init=False)
    _seen: OrderedDict[str, None] = field(default_factory=OrderedDict, init=False)

    async def run(self, stop: asyncio.Event) -> None:
        """Learn every completion of the run.

        Consumes: trajectories, from the earliest; control, from now on.
        Produces: nothing on a topic; versions of a model in a folder. It commits how far it has read, for displays.
        Waits for: trajectories.
        On failure: raises; a restart reads the trajectories again and goes on with the newest version.
        On stop: ends within one poll, as it does when the run has finished; a version under way is given up.
        """
        topic = TRAJECTORIES.full_name(self.run_name)
        trajectories = await self.bus.subscribe([topic], client_id=CLIENT_ID, group_id=f"{self.run_name}.{CLIENT_ID}")
        control = await self.bus.subscribe([CONTROL.full_name(self.run_name)], client_id=CLIENT_ID, start="latest")
        try:
            await self._learn(trajectories, control, stop)
        finally:
            await trajectories.close()
            await control.close()
            self.student.close()
        log.info("ranker ended", completions=self.learned)

    async def _learn(self, trajectories: Subscription, control: Subscription, stop: asyncio.Event) -> None:
        ends = await trajectories.end_offsets()
        committed_at, is_held, finished = self.clock(), True, False
        self.student.hold(True)
        while not stop.is_set() and not finished:
            self.on_tick("ranker")
            for record in await trajectories.poll(timeout_s=POLL_S):
                self._observe(record)
            finished = any(isinstance(_message(record), RunFinished) for record in await control.poll(timeout_s=0.0))
            positions = await trajectories.positions()
            if is_held and all(positions.get(tp, end) >= end for tp, end in ends.items()):
                is_held = False
                self.student.hold(False)
                log.info("ranker has read the past", completions=self.learned)
            if self.clock() - committed_at >= COMMIT_S:
                committed_at = self.clock()
                await self._commit(trajectories, positions)

    async def _commit(self, trajectories: Subscription, positions: dict[TopicPartition, int]) -> None:
        try:
            await trajectories.commit(positions)
        except Exception as error:
            log.warning("ranker's position not committed", error=str(error))

    def _observe(self, record: Record) -> None:
        message = _message(record)
        if not isinstance(message, Trajectory) or message.finish_reason is FinishReason.ABORT:
            return
        if message.trajectory_id in self._seen:
            return
        self._seen[message.trajectory_id] = None
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        self.student.observe(Completion.of(message))
        self.learned += 1


def _message(record: Record) -> Message | None:
    try:
        return None if record.value is None else record.message()
    except WireError:
        return None
