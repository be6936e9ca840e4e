"""A trainer that follows the run's control: one beside the served one, and the run's own, which may be served or not.

An instance learns from the same stream as the run's own trainer, and nobody waits for it: it reads the run's
trajectories and control, and writes nothing that dispatcher, workers or the served trainer read: its topics, consumer
group, lineages, checkpoints and weights are its own. What operators ask of it comes from the coordinator, over control.
When another policy is promoted, the trainers of both begin a new lineage: the one now exports for the workers, and
counts ages in its own versions, the other does so no longer.

Invariants, each with a test of its name:
- the_run_does_not_notice_an_instance: neither its end nor its crash changes a record of the run's own topics;
- a_paused_instance_takes_nothing, and goes on where it was;
- an_instance_outlives_no_stream: once the run is finished and everything read, it ends with a checkpoint; if the broker
  goes away with the run, it ends with the one that it has;
- one_policy_is_served: by what control says when a lineage begins, in all trainers alike; the weights of a policy that
  was promoted are above all that were announced before.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from streamrl.bus.port import Subscription, message_of
from streamrl.bus.waiting import until_ended
from streamrl.consumers.ingest.attachment import Attachment, Promoted
from streamrl.consumers.training.ports import OpenPolicy
from streamrl.consumers.training.standby import BEAT_S, LeadingTrainer
from streamrl.consumers.training.trainer import Trainer
from streamrl.schemas.control import InstanceState, Promotion, RunFinished, RunIdentity, Served, WeightsReady
from streamrl.schemas.errors import BusError, SettingsError
from streamrl.schemas.identifiers import SERVED_POLICY, PolicyVersion
from streamrl.schemas.messages import Message
from streamrl.schemas.topics import CONTROL

log = structlog.get_logger()

POLL_S = 0.5
ATTACHED_WITHIN_S = 30.0
"""Until the coordinator has answered: far above a poll of its loop, also on a busy machine."""
IDLE_POLLS = 3
"""Looks in a row that find nothing left to read: groups that were just read are taken meanwhile."""
CONTINUED_WITHIN_S = 120.0
"""Until the end of an earlier life of the run counts for its own trainer and a promoted one: a person has this long
to attach the policy that is served."""
GONE_AFTER_S = 10.0
"""Behind the end of the run, a broker that says nothing for so long ended with it: it is not waited for."""


@dataclass
class AttachedTrainer:
    """``trainer``: of an instance, with an attachment that is kept up to date here, or the run's own.
    ``attached_within_s``: patience until an instance is attached; ``gone_after_s``: patience with the broker of a run
    that is over. ``open_policy_of``: what opens the policy by whether it is served, if there is a difference.
    """

    trainer: Trainer
    beat_s: float = BEAT_S
    attached_within_s: float = ATTACHED_WITHIN_S
    gone_after_s: float = GONE_AFTER_S
    open_policy_of: Callable[[bool], OpenPolicy] | None = None
    weights_of: Callable[[bool], Path] | None = None
    _attachment: Attachment = field(init=False)
    _mode: str = ""
    _served: Served | None = None
    _promotion: Promotion | None = None
    _is_old_until: float = 0.0
    """An end of the run that was there at the start is not believed before, in seconds of the event loop's clock."""

    def __post_init__(self) -> None:
        self._attachment = self.trainer.attachment or Attachment("beginning")

    async def run(self, stop: asyncio.Event) -> None:
        """Train until the last step, until detached or stopped, or until the run is over and nothing is left of it.

        The run's own trainer, when it is not served, stays until the run is over.

        Consumes: the run's control, from the beginning; what a trainer does.
        Produces: what a trainer does, on topics of its own; weights for the workers while it is served.
        Waits for: the coordinator's word that it is attached; then what a trainer does.
        On failure: raises; a restart goes on from the newest checkpoint. A broker that went away with a finished run
            is no failure.
        On stop: ends as the trainer does.
        """
        trainer = self.trainer
        topic, client_id = CONTROL.full_name(trainer.run_name), f"{trainer.policy}-control"
        control = await trainer.bus.subscribe([topic], client_id=client_id, start="earliest")
        try:
            if await self._is_ready(control, stop):
                leading = LeadingTrainer(trainer, self.beat_s)
                async with leading.beating():
                    while await self._train(leading, control, stop):
                        log.info("going on in a new lineage", policy=trainer.policy, served=self._is_served)
        finally:
            await control.close()

    @property
    def _is_own(self) -> bool:
        return self.trainer.policy == SERVED_POLICY

    @property
    def _is_served(self) -> bool:
        served = SERVED_POLICY if self._served is None else self._served.policy
        return served == self.trainer.policy

    @property
    def _is_over(self) -> bool:
        """Whether nothing more comes. While the run's own trainer is served, its own last step says that."""
        is_awaited = self._is_own or self._is_served
        if is_awaited and asyncio.get_running_loop().time() < self._is_old_until:
            return False
        return self._attachment.run_is_over and not (self._is_own and self._is_served)

    @property
    def _standing(self) -> tuple[bool, PolicyVersion | None]:
        """What makes a trainer begin a new lineage when it changes: whether it is served, and since when."""
        is_served = self._is_served
        return is_served, self._served.since if is_served and self._served is not None else None

    async def _is_ready(self, control: Subscription, stop: asyncio.Event) -> bool:
        """Read all that control holds, and wait until an instance is attached; false if stopped before.

        Raises:
            SettingsError: nobody attached it, or the run has no trainer yet.
        """
        ends = await control.end_offsets()
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self.attached_within_s
        while not stop.is_set():
            if not all(at >= ends[tp] for tp, at in (await control.positions()).items()):
                await self._poll(control)
            elif self._is_own or (self._mode in ("run", "pause") and self._attachment.run_id):
                self._is_old_until = loop.time() + CONTINUED_WITHIN_S
                return True
            else:
                await self._poll(control)
            if not self._is_own and loop.time() > give_up_at:
                run, policy = self.trainer.run_name, self.trainer.policy
                got = "no trainer yet" if not self._attachment.run_id else f"{self._mode or 'no word of it'}"
                raise SettingsError(
                    f"expected instance {policy} to be attached to run {run}, got {got} within "
                    f"{self.attached_within_s:.0f} s: is the run under way, with its coordinator? `streamrl status` "
                    "tells; then attach again"
                )
        return False

    async def _poll(self, control: Subscription) -> None:
        for record in await control.poll(timeout_s=POLL_S):
            self._apply(message_of(record))

    def _apply(self, message: Message | None) -> None:
        held = self._attachment
        match message:
            case InstanceState(policy=self.trainer.policy):
                self._mode, held.is_paused = message.mode, message.mode == "pause"
                log.info("instance", mode=message.mode, reason=message.reason)
            case WeightsReady() if message.version > held.served:
                # Behind the end of a run, newer weights mean that it goes on.
                held.served, held.run_is_over = message.version, False
                self._promotion = message.promotion
            case Served():
                self._served = message
            case RunFinished():
                held.run_is_over, self._is_old_until = True, 0.0
            case RunIdentity():
                held.run_id = message.run_id

    def _placed(self) -> Trainer:
        """The trainer as control says that it stands to the run now."""
        served, promotion, held = self._served, self._promotion, self._attachment
        held.promoted = None
        if served is not None and self._is_served:
            # Its numbers go on as they were announced, also after a restart.
            is_known = promotion is not None and (promotion.policy, promotion.since) == (served.policy, served.since)
            held.promoted = Promoted(served.since, promotion.shift if promotion is not None and is_known else None)
        trainer = self.trainer
        # Served from the beginning, it has nothing to do with anybody else's weights.
        attachment = None if self._is_own and served is None else held
        opener = self.open_policy_of
        open_policy = trainer.open_policy if opener is None else opener(self._is_served)
        weights = trainer.weights if self.weights_of is None else self.weights_of(self._is_served)
        return replace(trainer, attachment=attachment, open_policy=open_policy, weights=weights)

    async def _train(self, leading: LeadingTrainer, control: Subscription, stop: asyncio.Event) -> bool:
        """Train as long as nothing changes; whether to go on in a new lineage, since another policy is served."""
        was_served, trainer, ending = self._is_served, self._placed(), asyncio.Event()
        leading.trainer = trainer
        training = asyncio.create_task(trainer.run(ending))
        try:
            is_changed = await self._follow(control, trainer, training, stop)
        except BaseException:
            training.cancel()
            raise
        finally:
            ending.set()
            # A cancellation that comes meanwhile ends it at once, and is waited for as well.
            await until_ended([training], on_cancel=training.cancel)
        await self._settle(control, training)
        if is_changed or was_served or not self._is_own:
            return is_changed and not stop.is_set()
        return await self._rest(control, stop)

    async def _follow(
        self, control: Subscription, trainer: Trainer, training: "asyncio.Task[None]", stop: asyncio.Event
    ) -> bool:
        """Keep the attachment up to date until the trainer is to end, or has; whether another policy is served."""
        standing, idle, loop = self._standing, 0, asyncio.get_running_loop()
        heard_at = loop.time()
        while not stop.is_set() and not training.done() and idle < IDLE_POLLS:
            await self._poll(control)
            if self._standing != standing:
                log.info("this policy is served from now on" if self._is_served else "another policy is served now")
                return True
            if self._mode == "detached":
                log.info("detached: ending with a checkpoint")
                return False
            if not self._is_over:
                heard_at = loop.time()
                continue
            is_drained = await self._is_drained(control, trainer)
            idle = idle + 1 if is_drained else 0
            heard_at = loop.time() if is_drained is not None else heard_at
            if loop.time() - heard_at > self.gone_after_s:
                # Nothing could be confirmed any more: an orderly end would wait for the broker for minutes.
                training.cancel()
                return False
        if idle:
            log.info("the run is over and everything of it was read: ending with a checkpoint")
        return False

    async def _rest(self, control: Subscription, stop: asyncio.Event) -> bool:
        """The run's own trainer is through, and another policy goes on: its end would be taken for the run's.

        Returns when the run is over, or stopped; true if this policy is served again.
        """
        while not stop.is_set() and not self._is_over:
            await self._poll(control)
            if self._is_served:
                return not stop.is_set()
        return False

    async def _is_drained(self, control: Subscription, trainer: Trainer) -> bool | None:
        """Whether nothing is left to read; None: the broker did not say."""
        session = trainer.session
        try:
            await control.end_offsets()  # for the answer as such: what was read before may be trained for a while
            return session is not None and await session.reader.is_drained()
        except BusError as error:
            log.warning("not known whether anything is left to read", error=str(error))
            return None

    async def _is_gone(self, control: Subscription) -> bool:
        """Whether the broker says nothing any more, of a run that is over: one that only failed once is still there."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self.gone_after_s
        while loop.time() < give_up_at:
            try:
                await control.end_offsets()
            except BusError:
                await asyncio.sleep(POLL_S)
            else:
                return False
        return True

    async def _settle(self, control: Subscription, training: "asyncio.Task[None]") -> None:
        error = None if training.cancelled() else training.exception()
        if error is None and not training.cancelled():
            return
        if self._is_over and (error is None or (isinstance(error, BusError) and await self._is_gone(control))):
            log.warning(
                "the run is over and its broker is gone; what has no checkpoint is trained again", why=str(error)
            )
            return
        assert error is not None, "cancelled behind the end of the run alone"
        raise error
