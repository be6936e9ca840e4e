"""A trainer that follows the run's control: an instance beside the run's own trainer, or that trainer itself.

An instance learns from the same stream as the run's own trainer. It reads the run's trajectories and control, and
writes nothing that dispatcher, workers or the served trainer read: its topics, consumer group, lineages, checkpoints
and weights are its own. The coordinator passes on to it over control what operators ask. When another policy is
promoted, the trainers of both begin a new lineage: the one now exports for the workers and counts ages in its own
versions, and the other no longer does.

Invariants, each with a test of its name:
- the_run_does_not_notice_an_instance: neither its end nor its crash changes a record of the run's own topics;
- a_paused_instance_takes_nothing, and goes on where it was;
- an_instance_outlives_no_stream: once the run is finished and everything read, it ends with a checkpoint; if the broker
  goes away with the run, it ends with the one that it has;
- one_policy_is_served: by what control says when a lineage begins, in all trainers alike; the weights of a policy that
  was promoted are above all that were announced before.
"""

import asyncio
from dataclasses import dataclass, field, replace

import structlog

from streamrl.bus.port import Subscription, message_of
from streamrl.bus.waiting import until_ended
from streamrl.consumers.training.leading import BEAT_S, beating
from streamrl.consumers.training.session import PartsOf, TrainerContext
from streamrl.consumers.training.trainer import Trainer
from streamrl.policies.attachment import Attachment
from streamrl.schemas.control import RunFinished
from streamrl.schemas.errors import BusError, IdentityError, SettingsError
from streamrl.schemas.identifiers import SERVED_POLICY
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
class FollowingTrainer:
    """``context``: of the policy's trainer; its standing is decided here, for one lineage at a time.

    ``beat_s``: seconds between two beats. ``attached_within_s``: patience until an instance is attached;
    ``gone_after_s``: patience with the broker of a run that is over. ``parts_of``: the trainer's parts by whether its
    policy is served; None: those of the context, in both cases.
    """

    context: TrainerContext
    beat_s: float = BEAT_S
    attached_within_s: float = ATTACHED_WITHIN_S
    gone_after_s: float = GONE_AFTER_S
    parts_of: PartsOf | None = None
    _attachment: Attachment = field(init=False)
    _trainer: Trainer = field(init=False)
    """Of the newest lineage."""
    _is_old_until: float = field(init=False, default=0.0)
    """An end of the run that was there at the start is not believed before, in seconds of the event loop's clock."""

    def __post_init__(self) -> None:
        policy = self.context.run.policy
        begin = "beginning" if policy == SERVED_POLICY else self.context.settings.ingest.attach_from
        self._attachment, self._trainer = Attachment(policy, begin), Trainer(self.context)

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
        context, run = self.context, self.context.run
        topic, client_id = CONTROL.full_name(run.name), f"{run.policy}-control"
        control = await run.bus.subscribe([topic], client_id=client_id, start="earliest")
        try:
            if await self._is_ready(control, stop):
                async with beating(context, lambda: self._trainer.version, self.beat_s):
                    while await self._train(control, stop):
                        log.info("going on in a new lineage", policy=run.policy, served=self._attachment.is_served)
        finally:
            await control.close()

    async def _is_ready(self, control: Subscription, stop: asyncio.Event) -> bool:
        """Read all that control holds, and wait until an instance is attached; false if stopped before.

        Raises:
            SettingsError: nobody attached it, or the run has no trainer yet.
        """
        held, ends = self._attachment, await control.end_offsets()
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self.attached_within_s
        while not stop.is_set():
            if not all(at >= ends[tp] for tp, at in (await control.positions()).items()):
                await self._poll(control)
            elif held.is_own or (held.mode in ("run", "pause") and held.run_id):
                self._is_old_until = loop.time() + CONTINUED_WITHIN_S
                return True
            else:
                await self._poll(control)
            if not held.is_own and loop.time() > give_up_at:
                got = "no trainer yet" if not held.run_id else f"{held.mode or 'no word of it'}"
                raise SettingsError(
                    f"expected instance {held.policy} to be attached to run {self.context.run.name}, got {got} within "
                    f"{self.attached_within_s:.0f} s: is the run under way, with its coordinator? `streamrl status` "
                    "tells; then attach again"
                )
        return False

    async def _poll(self, control: Subscription) -> None:
        for record in await control.poll(timeout_s=POLL_S):
            message = message_of(record)
            self._attachment.hear(message)
            if isinstance(message, RunFinished):
                self._is_old_until = 0.0

    async def _train(self, control: Subscription, stop: asyncio.Event) -> bool:
        """Train as long as nothing changes; whether to go on in a new lineage, since another policy is served."""
        held, ending = self._attachment, asyncio.Event()
        was_served = held.is_served
        self._trainer = trainer = Trainer(self._placed())
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
        if is_changed or was_served or not held.is_own:
            return is_changed and not stop.is_set()
        return await self._rest(control, stop)

    def _placed(self) -> TrainerContext:
        """What the trainer of the next lineage is given, by what control says now.

        Raises:
            IdentityError: the directory is that of an instance of another run.
        """
        context, held = self.context, self._attachment
        standing = held.standing(context.settings.ingest.max_served_age)
        own = context.run.identity.load()
        if standing.run_id and own is not None and own.run_id != standing.run_id:
            raise IdentityError(
                f"expected the directory of instance {held.policy} to belong to run {context.run.name} "
                f"({standing.run_id}), got another run's of this name ({own.run_id}): attach under another name, or "
                f"move {context.run.directory} away"
            )
        parts = context.parts if self.parts_of is None else self.parts_of(held.is_served)
        return replace(context, standing=standing, parts=parts)

    async def _follow(
        self, control: Subscription, trainer: Trainer, training: "asyncio.Task[None]", stop: asyncio.Event
    ) -> bool:
        """Keep the attachment up to date until the trainer is to end, or has; whether another policy is served."""
        held, idle, loop = self._attachment, 0, asyncio.get_running_loop()
        place = held.place
        heard_at = loop.time()
        while not stop.is_set() and not training.done() and idle < IDLE_POLLS:
            await self._poll(control)
            if held.place != place:
                log.info("this policy is served from now on" if held.is_served else "another policy is served now")
                return True
            if held.mode == "detached":
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

    @property
    def _is_over(self) -> bool:
        """Whether nothing more comes. While the run's own trainer is served, its own last step says that."""
        held = self._attachment
        if (held.is_own or held.is_served) and asyncio.get_running_loop().time() < self._is_old_until:
            return False
        return held.run_is_over and not (held.is_own and held.is_served)

    async def _is_drained(self, control: Subscription, trainer: Trainer) -> bool | None:
        """Whether nothing is left to read; None: the broker did not say."""
        session = trainer.session
        try:
            await control.end_offsets()  # for the answer as such: what was read before may be trained for a while
            return session is not None and await session.reader.is_drained()
        except BusError as error:
            log.warning("not known whether anything is left to read", error=str(error))
            return None

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

    async def _rest(self, control: Subscription, stop: asyncio.Event) -> bool:
        """The run's own trainer is through, and another policy goes on: its end would be taken for the run's.

        Returns when the run is over, or stopped; true if this policy is served again.
        """
        while not stop.is_set() and not self._is_over:
            await self._poll(control)
            if self._attachment.is_served:
                return not stop.is_set()
        return False
