"""The ranker's loop: reads the trajectories in its own consumer group, and makes newer length models from them.

Invariants, each with a test of its name:
- predictors_never_wait_for_the_ranker: predictors load newer models from a folder. Without a ranker they continue with
  the model that they have;
- no_version_is_made_before_the_past_is_read: after a restart, models are made only after all trajectories that were
  there at the start have been read.
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
from streamrl.producers.lengths.learned.model_updates import FIT_RULES, BackgroundFit, FitRules
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
"""Longest wait for trajectories in seconds, so that a stop is noticed soon."""
COMMIT_S = 5.0
"""Seconds between two commits of the read position, which only displays use."""
REMEMBERED = 100_000
"""Newest trajectories that are recognised when they are read again."""


class ModelTrainer(Protocol):
    """Learns completions, and regularly writes a newer version of its model: trees or a language model.

    Works in a thread and never raises. A fit that fails is logged and changes nothing; the next fit starts on time.
    """

    def close(self) -> None:
        """Abandon a running fit as soon as possible."""
        ...

    def observe(self, completion: ObservedCompletion) -> None:
        """Learn a finished completion."""
        ...

    def hold(self, held: bool) -> None:
        """Make no versions while ``held``."""
        ...

    def wait(self) -> None:
        """Wait until no fit is running."""
        ...


def build_model_trainer(settings: LengthSettings, loop: LoopSettings, rules: FitRules = FIT_RULES) -> ModelTrainer:
    """The model trainer for the predictor that the settings name.

    Raises:
        SettingsError: the predictor has no model, or a language model has neither a version nor a base model.
    """
    if settings.predictor == "learned":
        return TreeTrainer(settings, loop, rules)
    if settings.predictor == "language_model" and settings.model_dir is not None:
        return LanguageModelTrainer(settings, settings.model_dir, rules)
    raise SettingsError(f"expected lengths.predictor learned or language_model for a ranker, got {settings.predictor}")


class TreeTrainer:
    """Fits trees, by a predictor that fits in a thread and is never asked for estimates."""

    def __init__(self, settings: LengthSettings, loop: LoopSettings, rules: FitRules = FIT_RULES) -> None:
        # It fits as the dispatcher's thread would. Bucket boundaries are fitted by the dispatcher.
        fitting = settings.model_copy(update={"refit": "thread", "buckets": "fixed"})
        self._predictor = LearnedLengths(fitting, loop, rules=rules)

    def observe(self, completion: ObservedCompletion) -> None:
        """Learn a finished completion."""
        self._predictor.observe(completion)

    def hold(self, held: bool) -> None:
        """Make no versions while ``held``."""
        self._predictor.hold_fits(held)

    def wait(self) -> None:
        """Wait until no fit is running."""
        self._predictor.wait()

    def close(self) -> None:
        """Do nothing: a fit of trees ends within seconds."""


class LanguageModelTrainer:
    """Fine-tunes the newest version for ``FitRules.refit_s`` on a sample of recent completions."""

    def __init__(self, settings: LengthSettings, folder: Path, rules: FitRules = FIT_RULES) -> None:
        self._settings = settings
        self._rules = rules
        self._store = ModelStore(folder, "language")
        if self._store.newest() is None and settings.base_model is None:
            raise SettingsError(
                f"expected a language model in {folder} (lengths.model_dir), got none: make one with "
                "`streamrl lengths fit --run RUN --out DIR`, or set lengths.base_model"
            )
        self._held = False
        self._since_fit = 0
        self._newest = 0
        self._sample: list[ObservedCompletion] = []
        self._random = random.Random(0)
        self._fitting = BackgroundFit()
        self._closing = threading.Event()

    def observe(self, completion: ObservedCompletion) -> None:
        """Learn a finished completion; when the sample is full, it replaces a random one."""
        self._newest = max(self._newest, completion.version)
        # A random one is replaced, so that old completions fade out as in a Reservoir.
        if len(self._sample) < self._rules.reservoir_size:
            self._sample.append(completion)
        else:
            self._sample[self._random.randrange(len(self._sample))] = completion
        self._since_fit += 1
        # Few at first, because each completion then adds much.
        interval = self._rules.interval(len(self._sample))
        if not self._held and self._since_fit >= interval and not self._fitting.is_busy:
            self._since_fit = 0
            # Copies, because the sample changes while the thread reads them.
            completions, newest = list(self._sample), self._newest
            self._fitting.start(lambda: self._fine_tune(completions, newest))

    def hold(self, held: bool) -> None:
        """Make no versions while ``held``."""
        self._held = held

    def wait(self) -> None:
        """Wait until no fine-tuning is running."""
        self._fitting.wait()

    def close(self) -> None:
        """Abandon the version that is being made."""
        self._closing.set()

    def _fine_tune(self, completions: list[ObservedCompletion], newest: int) -> None:
        """Fine-tune the newest version, or the base model, and save the next version. Runs in the thread."""
        from streamrl.producers.lengths.learned.language_model import (
            FineTuning,
            make_training_set,
            open_regressor,
            save,
            train,
        )

        start, before = self._store.newest() or (self._settings.base_model, None)
        assert start is not None, "a version or lengths.base_model was checked in __init__"
        # A model's scale never changes, because its head has learned numbers that were divided by the scale.
        examples = make_training_set(completions, scale=None if before is None else before.details["scale"])
        regressor = open_regressor(start)
        version = self._store.next_version()
        # The number of passes is limited only by the seconds.
        tuning = FineTuning(epochs=1e9, seconds=self._rules.refit_s, seed=version)
        loss = train(regressor, examples, self._rules.upper, tuning, self._closing.is_set)
        # A model that was cut short while its learning rate was high must not become the newest version.
        if self._closing.is_set():
            return
        manifest = Manifest(
            version=version,
            policy_version=newest,
            observations=len(completions),
            # Data sets that are not in the sample keep their levels.
            levels={**({} if before is None else before.levels), **examples.levels},
            details={"scale": examples.scale},
        )
        save(regressor, manifest, self._store.folder)
        log.info("language model refreshed", version=version, observations=len(completions), loss=round(loss, 4))


@dataclass
class Ranker:
    """Makes a run's length models. A second ranker would only make version numbers skip.

    ``on_tick`` is called with the loop's name at every turn.
    """

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
        Produces: no records, but versions of a model in a folder. It commits its read position, for displays.
        Waits for: trajectories.
        On failure: raises; a restart reads the trajectories again and continues with the newest version.
        On stop: returns within one poll, as it does when the run has finished; a version in progress is abandoned.
        """
        topic = TRAJECTORIES.full_name(self.run_name)
        # A cancellation may come when only one client is open, or while one is being closed. The stack closes all.
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
        # Everything up to the present end is the past. A model made before it is read would be of an old policy.
        ends = await trajectories.end_offsets()
        committed_at, is_held, finished = self.clock(), True, False
        self.trainer.hold(True)
        while not stop.is_set() and not finished:
            self.on_tick("ranker")
            for record in await trajectories.poll(timeout_s=POLL_S):
                self._observe(record)
            # No waiting, because the poll of trajectories has waited already.
            finished = any(isinstance(message_of(record), RunFinished) for record in await control.poll(timeout_s=0.0))
            positions = await trajectories.positions()
            if is_held and all(positions.get(tp, end) >= end for tp, end in ends.items()):
                is_held = False
                self.trainer.hold(False)
                log.info("ranker has read the earlier completions", completions=self.learned)
            if self.clock() - committed_at >= COMMIT_S:
                committed_at = self.clock()
                await self._commit(trajectories, positions)

    async def _commit(self, trajectories: Subscription, positions: dict[TopicPartition, int]) -> None:
        try:
            await trajectories.commit(positions)
        # The group may be rebalancing, or the broker unavailable. Only displays use the position.
        except Exception as error:
            log.warning("ranker's position not committed", error=str(error))

    def _observe(self, record: Record) -> None:
        message = message_of(record)
        if not isinstance(message, Trajectory) or message.finish_reason is FinishReason.ABORT:
            return
        # Records may be delivered more than once; a repeat must not count twice.
        if message.trajectory_id in self._seen:
            return
        self._seen[message.trajectory_id] = None
        self.trainer.observe(ObservedCompletion.of(message))
        self.learned += 1
