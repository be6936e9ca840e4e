"""A standby trainer: it has everything loaded, and takes over when the leading trainer is silent.

A take-over is an ordinary start: the older trainer is fenced in Kafka and in the checkpoint storage. So a leader that
was only slow ends as superseded, and no step counts twice. A standby saves the time of imports and of loading model and
checkpoint. It measures silence with its own clock only. Invariants, each with a test of its name:
- a_silent_leader_is_replaced, within ``TAKEOVER_AFTER_S`` and the time of a start without loading;
- a_leader_with_heartbeats_is_not_replaced, however long its steps take; nor is a leader that is still starting;
- a_broker_outage_does_not_count_as_silence, nor does a suspension of the standby itself.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from streamrl.bus.port import Subscription, message_of
from streamrl.bus.waiting import end_tasks, in_thread
from streamrl.consumers.training.checkpoints.catalogue import CheckpointsState, Lineage
from streamrl.consumers.training.leading import BEAT_S, LeadingTrainer
from streamrl.consumers.training.ports import Checkpoints, Compute, OpenPolicy, Policy, RestoredCheckpoint
from streamrl.consumers.training.session import TrainerContext
from streamrl.consumers.training.trainer import Trainer
from streamrl.schemas.errors import BusError, CheckpointError
from streamrl.schemas.reports import StepReport, TrainerBeat
from streamrl.schemas.topics import HEARTBEATS, STEPS

log = structlog.get_logger()

TAKEOVER_AFTER_S = 4.0
"""Seconds without a heartbeat of the leading trainer until a standby takes over: four heartbeats."""
FIRST_WORD_S = 60.0
"""Seconds until a leader that has never sent a heartbeat counts as missing: it may have started at the same time, and
takes as long to load."""
POLL_S = 0.25
"""Seconds within which a request to take over, or a stop, is noticed."""


@dataclass
class Prefetch:
    """Loads the newest checkpoint and its policy in advance; it takes the place of the trainer's ``Checkpoints``.

    ``newest_mark`` identifies, cheaply, the checkpoint that a start would continue from. Calls come one at a time.
    """

    checkpoints: Checkpoints
    opened_by: OpenPolicy
    newest_mark: Callable[[], Any]
    _mark: Any = None
    _restored: RestoredCheckpoint | None = None
    _policy: Policy | None = None

    def refresh(self) -> None:
        """Load the newest checkpoint, unless it is loaded already."""
        try:
            mark = self.newest_mark()
            if self._policy is not None and mark == self._mark:
                return
            self._policy = self._restored = None  # first: two policies may not fit into memory
            restored = self.checkpoints.newest()
            self._policy, self._restored, self._mark = self.opened_by(restored), restored, mark
        except CheckpointError as error:
            # For example, the trainer pruned it while it was read. The next refresh, or the start itself, tries again.
            log.warning("nothing loaded in advance", error=str(error))

    def held(self, claimed: int = 0) -> CheckpointsState:
        """See ``Checkpoints``."""
        return self.checkpoints.held(claimed)

    def claim_lineage(self, *, at_least: int = 1, now: float) -> Lineage:
        """See ``Checkpoints``."""
        return self.checkpoints.claim_lineage(at_least=at_least, now=now)

    def newest(self) -> RestoredCheckpoint | None:
        """See ``Checkpoints``; a prefetched checkpoint was verified when it was loaded."""
        if self._policy is not None and self.newest_mark() == self._mark:
            return self._restored
        self._policy = self._restored = None
        return self.checkpoints.newest()

    def open_policy(self, restored: RestoredCheckpoint | None) -> Policy:
        """The prefetched policy if it belongs to that checkpoint; otherwise a newly opened one."""
        policy, self._policy = self._policy, None
        if policy is not None and restored is self._restored:
            log.info("continuing with the policy loaded in advance")
            return policy
        return self.opened_by(restored)


@dataclass
class _Watch:
    """What a standby knows about the leader. Times are from its own monotonic clock."""

    algorithm: str
    heard_at: float
    was_heard: bool = False
    is_finished: bool = False
    has_new_checkpoint: bool = False

    def hear(self, message: object, now: float) -> None:
        """Process a message of the run."""
        if isinstance(message, TrainerBeat | StepReport) and message.algorithm == self.algorithm:
            self.heard_at, self.was_heard = now, True
        if isinstance(message, StepReport) and message.algorithm == self.algorithm:
            self.is_finished, self.has_new_checkpoint = message.finished, True


@dataclass
class _PrefetchTask:
    """Loads the newest checkpoint in the compute thread, one at a time."""

    prefetch: Prefetch
    compute: Compute
    _task: "asyncio.Task[None] | None" = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._refresh())

    async def _refresh(self) -> None:
        await self.compute(self.prefetch.refresh)

    def is_idle(self) -> bool:
        """Whether nothing is being loaded; raises the error of a failed load."""
        if self._task is None or not self._task.done():
            return self._task is None
        self._task.result()
        return True

    async def ended(self) -> None:
        """Wait for the load; raises its error if it failed."""
        if self._task is not None:
            await self._task

    async def close(self) -> None:
        """Drop the load: waits for one that has started, and discards its result."""
        if self._task is not None:
            await end_tasks([self._task])


Lead = Callable[[TrainerContext, float], Callable[[asyncio.Event], Awaitable[None]]]
"""From a context and the seconds between two heartbeats, makes a coroutine function that trains and sends them."""


@dataclass
class StandbyTrainer:
    """Waits for the leader's silence, then leads.

    ``context``: of the trainer that takes over; its parts use ``prefetch``. ``takeover_after_s``: seconds of silence
    after which the leader counts as lost; ``first_beat_timeout_s``: the same before a leader's first message; ``lead``:
    how it trains.
    """

    context: TrainerContext
    prefetch: Prefetch
    takeover_after_s: float = TAKEOVER_AFTER_S
    monotonic: Callable[[], float] = time.monotonic
    beat_s: float = BEAT_S
    first_beat_timeout_s: float = FIRST_WORD_S
    lead: Lead = lambda context, beat_s: LeadingTrainer(Trainer(context), beat_s).run
    _asked: asyncio.Event = field(default_factory=asyncio.Event)

    def take_over(self) -> None:
        """Take over now, without waiting for silence: the caller knows that the leader is gone."""
        self._asked.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Stand by, then lead once no other trainer does.

        Consumes: heartbeats and steps, from now on; checkpoints.
        Produces: nothing, then what a trainer does.
        Waits for: the leader's silence.
        On failure: raises; a restart stands by again.
        On stop: ends. It also ends when the leader has finished the run.
        """
        if not await self._leader_is_gone(stop):
            return
        await self.lead(self.context, self.beat_s)(stop)

    async def _leader_is_gone(self, stop: asyncio.Event) -> bool:
        run, algorithm = self.context.run, self.context.settings.algorithm.name
        topics = [topic.full_name(run.scope) for topic in (HEARTBEATS, STEPS)]
        subscription = await run.bus.subscribe(topics, client_id=f"{algorithm}-standby", start="latest")
        compute = self.context.parts.open_compute()
        try:
            gone = await self._watch(subscription, compute, stop)
            if gone:
                log.warning("taking over: the leading trainer is silent or gone", asked=self._asked.is_set())
            return gone
        finally:
            await subscription.close()
            # In a thread, so that the Kafka client's tasks keep running.
            await in_thread(compute.close)

    async def _watch(self, subscription: Subscription, compute: Compute, stop: asyncio.Event) -> bool:
        prefetching = _PrefetchTask(self.prefetch, compute)
        try:
            return await self._listen(subscription, prefetching, stop)
        finally:
            await prefetching.close()

    async def _listen(self, subscription: Subscription, prefetching: "_PrefetchTask", stop: asyncio.Event) -> bool:
        watch, polled_at = _Watch(self.context.settings.algorithm.name, self.monotonic()), self.monotonic()
        prefetching.start()
        log.info("standing by")
        while not stop.is_set():
            if self._asked.is_set():
                await prefetching.ended()  # the start uses its result
                return True
            records = await subscription.poll(timeout_s=POLL_S)
            now = self.monotonic()
            # Time in which this process was suspended, or in which a poll waited for the broker, is not silence.
            if now - polled_at > self.takeover_after_s / 2:
                watch.heard_at += now - polled_at
            polled_at = now
            for record in records:
                watch.hear(message_of(record), now)
            if prefetching.is_idle() and watch.has_new_checkpoint:
                watch.has_new_checkpoint = False
                prefetching.start()
            patience = (
                self.takeover_after_s if watch.was_heard else max(self.first_beat_timeout_s, self.takeover_after_s)
            )
            if now - watch.heard_at > patience and await self._broker_answers(subscription, watch):
                await prefetching.ended()
                if watch.is_finished:
                    log.info("the run is finished, nothing to take over")
                return not watch.is_finished
        return False

    async def _broker_answers(self, subscription: Subscription, watch: _Watch) -> bool:
        """Whether the broker answers; if not, the leader's silence is counted from now."""
        try:
            # Only the answer matters: any other read-only request would do.
            await subscription.end_offsets()
        except BusError as error:
            log.warning("the broker does not answer, so the leader is not replaced", error=str(error))
            watch.heard_at = self.monotonic()
            return False
        return True
