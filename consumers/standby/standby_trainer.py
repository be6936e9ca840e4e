"""A trainer that stands by has everything loaded, and takes over when the leading one is silent.

Taking over is an ordinary start: the older trainer is fenced in Kafka and at the checkpoints, so one that was only
slow ends superseded, and no step counts twice. What a standby saves is time: imports, model and checkpoint are there.
Silence is measured by the listener's clock alone. Invariants, each with a test of its name:
- a_silent_leader_is_replaced, within ``training.takeover_after_s`` and the time of a start without loading;
- a_leader_that_beats_is_left_alone, however long its steps take, and one that is still starting as well;
- an_outage_of_the_broker_is_no_silence_of_the_leader, nor is a standstill of the standby itself.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from streamrl.bus.port import Subscription, message_of
from streamrl.bus.waiting import end_tasks, in_thread
from streamrl.consumers.training.checkpoints.catalogue import HeldCheckpoints, Lineage
from streamrl.consumers.training.leading import BEAT_S, LeadingTrainer
from streamrl.consumers.training.ports import Checkpoints, Compute, OpenPolicy, Policy, RestoredCheckpoint
from streamrl.consumers.training.session import TrainerContext
from streamrl.consumers.training.trainer import Trainer
from streamrl.schemas.errors import BusError, CheckpointError
from streamrl.schemas.reports import StepReport, TrainerBeat
from streamrl.schemas.topics import HEARTBEATS, STEPS

log = structlog.get_logger()

FIRST_WORD_S = 60.0
"""Until a leader that was never heard of counts as none: it may be starting at the same time, and loads as much."""
POLL_S = 0.25
"""How soon a request to take over, or a stop, is noticed."""


@dataclass
class Prefetch:
    """The newest checkpoint and its policy, loaded before they are wanted; stands where the trainer looks for them.

    ``newest_mark`` tells cheaply what a start would go on from. All calls come one after the other.
    """

    checkpoints: Checkpoints
    opened_by: OpenPolicy
    newest_mark: Callable[[], Any]
    _mark: Any = None
    _restored: RestoredCheckpoint | None = None
    _policy: Policy | None = None

    def refresh(self) -> None:
        """Load what is newest by now, if it is not loaded."""
        try:
            mark = self.newest_mark()
            if self._policy is not None and mark == self._mark:
                return
            self._policy = self._restored = None  # first: two of them may not fit into memory
            restored = self.checkpoints.newest()
            self._policy, self._restored, self._mark = self.opened_by(restored), restored, mark
        except CheckpointError as error:
            # Such as one that its trainer prunes while it is read; there is another try, and the start's own.
            log.warning("nothing loaded in advance", error=str(error))

    def held(self, claimed: int = 0) -> HeldCheckpoints:
        """See ``Checkpoints``."""
        return self.checkpoints.held(claimed)

    def claim_lineage(self, *, at_least: int = 1, now: float) -> Lineage:
        """See ``Checkpoints``."""
        return self.checkpoints.claim_lineage(at_least=at_least, now=now)

    def newest(self) -> RestoredCheckpoint | None:
        """See ``Checkpoints``; what is loaded was verified when it was."""
        if self._policy is not None and self.newest_mark() == self._mark:
            return self._restored
        self._policy = self._restored = None
        return self.checkpoints.newest()

    def open_policy(self, restored: RestoredCheckpoint | None) -> Policy:
        """The policy that was loaded in advance, if it is of that checkpoint."""
        policy, self._policy = self._policy, None
        if policy is not None and restored is self._restored:
            log.info("going on with what was loaded in advance")
            return policy
        return self.opened_by(restored)


@dataclass
class _Watch:
    """What a standby has heard of the leader. Times are of its own monotonic clock."""

    algorithm: str
    heard_at: float
    was_heard: bool = False
    is_finished: bool = False
    has_new_checkpoint: bool = False

    def hear(self, message: object, now: float) -> None:
        """A message of the run."""
        if isinstance(message, TrainerBeat | StepReport) and message.algorithm == self.algorithm:
            self.heard_at, self.was_heard = now, True
        if isinstance(message, StepReport) and message.algorithm == self.algorithm:
            self.is_finished, self.has_new_checkpoint = message.finished, True


@dataclass
class _Prefetching:
    """Loads the newest checkpoint in the compute thread, one at a time."""

    prefetch: Prefetch
    compute: Compute
    _task: "asyncio.Task[None] | None" = None

    def begin(self) -> None:
        self._task = asyncio.create_task(self._refresh())

    async def _refresh(self) -> None:
        await self.compute(self.prefetch.refresh)

    def is_idle(self) -> bool:
        """Whether nothing is being loaded; raises what ended the load."""
        if self._task is None or not self._task.done():
            return self._task is None
        self._task.result()
        return True

    async def ended(self) -> None:
        """Wait for the load; raises what ended it."""
        if self._task is not None:
            await self._task

    async def close(self) -> None:
        """Give the load up: one that has begun is waited for; its result is dropped."""
        if self._task is not None:
            await end_tasks([self._task])


Lead = Callable[[TrainerContext, float], Callable[[asyncio.Event], Awaitable[None]]]
"""Of a context and the seconds between two beats: what trains, and says that it is alive."""


@dataclass
class StandbyTrainer:
    """``context``: of the trainer that takes over; its parts go by ``prefetch``. ``takeover_after_s``: silence after
    which the leader counts as lost; ``first_word_s``: the same while no leader was heard yet; ``lead``: how it trains.
    """

    context: TrainerContext
    prefetch: Prefetch
    takeover_after_s: float
    monotonic: Callable[[], float] = time.monotonic
    beat_s: float = BEAT_S
    first_word_s: float = FIRST_WORD_S
    lead: Lead = lambda context, beat_s: LeadingTrainer(Trainer(context), beat_s).run
    _asked: asyncio.Event = field(default_factory=asyncio.Event)

    def take_over(self) -> None:
        """Somebody knows that the leader is gone: do not wait for its silence."""
        self._asked.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Stand by; lead once no other trainer does.

        Consumes: heartbeats and steps, from now on; checkpoints.
        Produces: nothing, then what a trainer does.
        Waits for: the leader's silence.
        On failure: raises; a restart stands by again.
        On stop: ends, as it does when the leader has finished the run.
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
            # In a thread: the client's own tasks go on meanwhile.
            await in_thread(compute.close)

    async def _watch(self, subscription: Subscription, compute: Compute, stop: asyncio.Event) -> bool:
        prefetching = _Prefetching(self.prefetch, compute)
        try:
            return await self._listen(subscription, prefetching, stop)
        finally:
            await prefetching.close()

    async def _listen(self, subscription: Subscription, prefetching: "_Prefetching", stop: asyncio.Event) -> bool:
        watch, polled_at = _Watch(self.context.settings.algorithm.name, self.monotonic()), self.monotonic()
        prefetching.begin()
        log.info("standing by")
        while not stop.is_set():
            if self._asked.is_set():
                await prefetching.ended()  # the start goes on with it
                return True
            records = await subscription.poll(timeout_s=POLL_S)
            now = self.monotonic()
            # No leader was silent while this process stood still; a poll that found the broker away takes long, too.
            if now - polled_at > self.takeover_after_s / 2:
                watch.heard_at += now - polled_at
            polled_at = now
            for record in records:
                watch.hear(message_of(record), now)
            if prefetching.is_idle() and watch.has_new_checkpoint:
                watch.has_new_checkpoint = False
                prefetching.begin()
            patience = self.takeover_after_s if watch.was_heard else max(self.first_word_s, self.takeover_after_s)
            if now - watch.heard_at > patience and await self._answers(subscription, watch):
                await prefetching.ended()
                if watch.is_finished:
                    log.info("the run is finished, nothing to take over")
                return not watch.is_finished
        return False

    async def _answers(self, subscription: Subscription, watch: _Watch) -> bool:
        """Whether the broker answers; while it does not, no leader can be heard."""
        try:
            # For the answer as such: any question that changes nothing would do.
            await subscription.end_offsets()
        except BusError as error:
            log.warning("the broker is silent, so is everybody", error=str(error))
            watch.heard_at = self.monotonic()
            return False
        return True
