"""The ranker's loop: reads the trajectories as a group of its own, so that its trainer makes newer models of lengths.

Invariants, each with a test of its name:
- nobody_waits_for_the_ranker: predictors take models from a folder when there are newer ones; without a ranker they go
  on with what they have;
- the_past_makes_no_version: after a restart, models are made only once everything is read that was there at the start.
"""

import asyncio
import random
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog
from cachetools import FIFOCache

from streamrl.bus.port import Bus, Record, Subscription, TopicPartition, message_of
from streamrl.producers.lengths.learned.model_store import Manifest, ModelStore
from streamrl.producers.lengths.learned.model_updates import BackgroundFit
from streamrl.producers.lengths.learned.predictor import LearnedLengths
from streamrl.producers.lengths.predictor import ObservedCompletion
from streamrl.producers.lengths.settings import LengthSettings
from streamrl.schemas.control import RunFinished
from streamrl.schemas.errors import SettingsError
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import CONTROL, TRAJECTORIES
from streamrl.schemas.trajectories import FinishReason, Trajectory

log = structlog.get_logger()

CLIENT_ID = "ranker"
POLL_S = 0.5
"""Longest wait for trajectories, so that a stop is noticed soon."""
COMMIT_S = 5.0
"""Between two commits of how far it has read, which only displays look at."""
REMEMBERED = 100_000
"""Trajectories, the newest, that are recognised when they are read again."""


class ModelTrainer(Protocol):
    """Learns completions, and writes a newer version of its model every so often: trees, or a language model.

    Works in a thread and never raises: a fit that fails is logged and leaves the newest version as it is, and the next
    one is tried on time.
    """

    def close(self) -> None:
        """Give up what is under way, as soon as that can be."""
        ...

    def observe(self, completion: ObservedCompletion) -> None:
        """Learn a finished completion."""
        ...

    def hold(self, held: bool) -> None:
        """Make no versions while held."""
        ...

    def wait(self) -> None:
        """Until nothing is under way."""
        ...


def build_model_trainer(settings: LengthSettings, loop: LoopSettings) -> ModelTrainer:
    """The trainer of the predictor that the settings name.

    Raises:
        SettingsError: that predictor has no model, or there is nothing that a language model could start from.
    """
    if settings.predictor == "learned":
        return TreeTrainer(settings, loop)
    if settings.predictor == "language_model" and settings.model_dir is not None:
        return LanguageModelTrainer(settings, settings.model_dir)
    raise SettingsError(f"expected lengths.predictor learned or language_model for a ranker, got {settings.predictor}")


class TreeTrainer:
    """The predictor that fits in a thread, with nobody who asks it."""

    def __init__(self, settings: LengthSettings, loop: LoopSettings) -> None:
        # It fits as a dispatcher's own thread would; boundaries of buckets are the dispatcher's.
        self._predictor = LearnedLengths(settings.model_copy(update={"refit": "thread", "buckets": "fixed"}), loop)

    def observe(self, completion: ObservedCompletion) -> None:
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


class LanguageModelTrainer:
    """Fine-tunes the newest version for some seconds on a sample of the recent past."""

    def __init__(self, settings: LengthSettings, folder: Path) -> None:
        self._settings = settings
        self._store = ModelStore(folder, "language")
        if self._store.newest() is None and settings.base_model is None:
            raise SettingsError(
                f"expected a language model in {folder} (lengths.model_dir), got none: make one with "
                "`streamrl lengths fit`, or name lengths.base_model"
            )
        self._held = False
        self._since_fit = 0
        self._newest = 0
        self._sample: list[ObservedCompletion] = []
        self._random = random.Random(0)
        self._fitting = BackgroundFit()
        self._closing = threading.Event()

    def observe(self, completion: ObservedCompletion) -> None:
        """Learn a finished completion; once the sample is full, a random older one leaves."""
        self._newest = max(self._newest, completion.version)
        # A random one leaves, so that old completions fade out as they do in a Reservoir.
        if len(self._sample) < self._settings.reservoir_size:
            self._sample.append(completion)
        else:
            self._sample[self._random.randrange(len(self._sample))] = completion
        self._since_fit += 1
        # Few at first, since each completion then says much.
        interval = min(self._settings.refit_every, max(self._settings.min_samples, len(self._sample) // 2))
        if not self._held and self._since_fit >= interval and not self._fitting.is_busy:
            self._since_fit = 0
            # Copies: the thread reads them while the sample goes on changing.
            completions, newest = list(self._sample), self._newest
            self._fitting.start(lambda: self._fine_tune(completions, newest))

    def hold(self, held: bool) -> None:
        """Make no versions while held."""
        self._held = held

    def wait(self) -> None:
        """Until nothing is under way."""
        self._fitting.wait()

    def close(self) -> None:
        """Give up the version under way."""
        self._closing.set()

    def _fine_tune(self, completions: list[ObservedCompletion], newest: int) -> None:
        """In the thread: from the newest version, or the base model, to the next version."""
        from streamrl.producers.lengths.learned.language_model import (
            FineTuning,
            make_training_set,
            open_regressor,
            save,
            train,
        )

        start, before = self._store.newest() or (self._settings.base_model, None)
        assert start is not None, "checked when built"
        # A model keeps its scale for good: its head has learned numbers that were divided by it.
        examples = make_training_set(completions, scale=None if before is None else before.details["scale"])
        regressor = open_regressor(start)
        version = self._store.next_version()
        # As many passes as the seconds allow.
        tuning = FineTuning(epochs=1e9, seconds=self._settings.refit_seconds, seed=version)
        loss = train(regressor, examples, self._settings.quantile, tuning, self._closing.is_set)
        # Cut short while its learning rate was still high: no predictor should take it for the newest version.
        if self._closing.is_set():
            return
        manifest = Manifest(
            version=version,
            policy_version=newest,
            observations=len(completions),
            # Data sets that the sample does not hold keep the levels they had.
            levels={**({} if before is None else before.levels), **examples.levels},
            details={"scale": examples.scale},
        )
        save(regressor, manifest, self._store.folder)
        log.info("language model refreshed", version=version, observations=len(completions), loss=round(loss, 4))


@dataclass
class Ranker:
    """One per run; a second one does no harm but to the versions' numbers. ``on_tick`` is told of every turn."""

    bus: Bus
    run_name: str
    trainer: ModelTrainer
    clock: Callable[[], float] = time.monotonic
    on_tick: Callable[[str], None] = lambda name: None
    learned: int = field(default=0, init=False)
    _seen: FIFOCache[str, None] = field(default_factory=lambda: FIFOCache(REMEMBERED), init=False)

    async def run(self, stop: asyncio.Event) -> None:
        """Learn every completion of the run.

        Consumes: trajectories, from the earliest; control, from now on.
        Produces: nothing on a topic; versions of a model in a folder. It commits how far it has read, for displays.
        Waits for: trajectories.
        On failure: raises; a restart reads the trajectories again and goes on with the newest version.
        On stop: ends within one poll, as it does when the run has finished; a version under way is given up.
        """
        topic = TRAJECTORIES.full_name(self.run_name)
        # A cancellation may come before both clients are open, or while one of them is closed: the rest is closed too.
        async with AsyncExitStack() as closing:
            closing.callback(self.trainer.close)
            group_id, name = f"{self.run_name}.{CLIENT_ID}", CONTROL.full_name(self.run_name)
            trajectories = await self.bus.subscribe([topic], client_id=CLIENT_ID, group_id=group_id)
            closing.push_async_callback(trajectories.close)
            control = await self.bus.subscribe([name], client_id=CLIENT_ID, start="latest")
            closing.push_async_callback(control.close)
            await self._learn(trajectories, control, stop)
        log.info("ranker ended", completions=self.learned)

    async def _learn(self, trajectories: Subscription, control: Subscription, stop: asyncio.Event) -> None:
        # What is there now is the past: a model made half-way through it would be of an older policy than the newest.
        ends = await trajectories.end_offsets()
        committed_at, is_held, finished = self.clock(), True, False
        self.trainer.hold(True)
        while not stop.is_set() and not finished:
            self.on_tick("ranker")
            for record in await trajectories.poll(timeout_s=POLL_S):
                self._observe(record)
            # Without waiting, which the poll of trajectories has done already.
            finished = any(isinstance(message_of(record), RunFinished) for record in await control.poll(timeout_s=0.0))
            positions = await trajectories.positions()
            if is_held and all(positions.get(tp, end) >= end for tp, end in ends.items()):
                is_held = False
                self.trainer.hold(False)
                log.info("ranker has read the past", completions=self.learned)
            if self.clock() - committed_at >= COMMIT_S:
                committed_at = self.clock()
                await self._commit(trajectories, positions)

    async def _commit(self, trajectories: Subscription, positions: dict[TopicPartition, int]) -> None:
        try:
            await trajectories.commit(positions)
        # The group may be rebalancing or the broker away; nobody but displays looks at the position.
        except Exception as error:
            log.warning("ranker's position not committed", error=str(error))

    def _observe(self, record: Record) -> None:
        message = message_of(record)
        if not isinstance(message, Trajectory) or message.finish_reason is FinishReason.ABORT:
            return
        # Delivery is at least once; a repeat must not count twice.
        if message.trajectory_id in self._seen:
            return
        self._seen[message.trajectory_id] = None
        self.trainer.observe(ObservedCompletion.of(message))
        self.learned += 1
