"""A trainer that follows the run's control: an instance next to the run's own trainer, or that trainer itself.

An instance learns from the same stream as the run's own trainer. It reads the run's trajectories and control. It writes
nothing that dispatcher, workers or the served trainer read: its topics, consumer group, lineages, checkpoints and
weights are its own. The coordinator passes operators' commands to it over control. When another policy is promoted, the
trainers of both policies start a new lineage: the promoted one now exports weights for the workers and counts ages in
its own versions, and the other one stops doing so.

Invariants, each with a test of its name:
- the_run_is_unaffected_by_an_instance: neither its end nor its crash changes a record of the run's own topics;
- a_paused_instance_takes_nothing, and resumes at the same place;
- an_instance_ends_when_the_run_is_finished_and_read: it then writes a last checkpoint. If the broker stops after the
  run's end, the instance ends with the checkpoint that it has;
- one_policy_is_served: the control topic decides which, at the start of a lineage, for all trainers alike. The versions
  of a promoted policy are above all those announced before.
"""

import asyncio
from dataclasses import dataclass, field, replace

import structlog

from streamrl.bus.port import Subscription, message_of
from streamrl.bus.waiting import wait_for_tasks
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
"""Seconds for the coordinator to answer: far more than a poll of its loop, also on a busy machine."""
IDLE_POLLS = 3
"""Looks in a row that find nothing left to read, so that groups read just before are taken first."""
CONTINUED_WITHIN_S = 120.0
"""Seconds after the start in which the run's own trainer, and a promoted one, ignore the end of an earlier life of the
run: an operator has this long to attach the served policy."""
GONE_AFTER_S = 10.0
"""Seconds of silence after the run's end from which on the broker counts as gone."""


@dataclass
class FollowingTrainer:
    """Runs a policy's trainer, one lineage after the other.

    ``context``: the trainer's context, whose ``standing`` is decided here for each lineage. ``beat_s``: seconds between
    two heartbeats. ``attached_within_s``: seconds to wait until an instance is attached. ``gone_after_s``: seconds to
    wait for a silent broker after the run's end. ``parts_of``: gives the trainer's parts, by whether its policy is
    served; None: the context's parts in both cases.
    """

    context: TrainerContext
    beat_s: float = BEAT_S
    attached_within_s: float = ATTACHED_WITHIN_S
    gone_after_s: float = GONE_AFTER_S
    parts_of: PartsOf | None = None
    _attachment: Attachment = field(init=False)
    _trainer: Trainer = field(init=False)
    """The trainer of the newest lineage."""
    _ignore_end_until: float = field(init=False, default=0.0)
    """An end of the run from before the start is ignored until then, in seconds of the event loop's clock."""

    def __post_init__(self) -> None:
        policy = self.context.run.policy
        begin = "beginning" if policy == SERVED_POLICY else self.context.settings.ingest.attach_from
        self._attachment, self._trainer = Attachment(policy, begin), Trainer(self.context)

    async def run(self, stop: asyncio.Event) -> None:
        """Train until the last step, until detached or stopped, or until the run is over and all of it was read.

        The run's own trainer stays until the run is over, even while another policy is served.

        Consumes: the run's control, from the beginning; the topics that a trainer reads.
        Produces: the records of a trainer, on topics of its own; weights for the workers while it is served.
        Waits for: the coordinator to attach it; then what a trainer waits for.
        On failure: raises; a restart continues from the newest checkpoint. A broker that is gone after the end of the
            run is no failure.
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
        """Read the control topic to its end, and wait until an instance is attached; False if stopped before.

        Raises:
            SettingsError: the instance was not attached in time, or the run has no trainer yet.
        """
        held, ends = self._attachment, await control.end_offsets()
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self.attached_within_s
        while not stop.is_set():
            if all(at >= ends[tp] for tp, at in (await control.positions()).items()):
                if held.is_own or (held.mode in ("run", "pause") and held.run_id):
                    self._ignore_end_until = loop.time() + CONTINUED_WITHIN_S
                    return True
                # Only here: on a busy machine, reading the messages that are there may take longer than the limit.
                if loop.time() > give_up_at:
                    got = "no trainer yet" if not held.run_id else f"{held.mode or 'no message about it'}"
                    raise SettingsError(
                        f"expected instance {held.policy} to be attached to run {self.context.run.name}, got {got} "
                        f"within {self.attached_within_s:.0f} s; check with `streamrl status` that the run and its "
                        "coordinator are running, then attach again"
                    )
            await self._poll(control)
        return False

    async def _poll(self, control: Subscription) -> None:
        for record in await control.poll(timeout_s=POLL_S):
            message = message_of(record)
            self._attachment.hear(message)
            if isinstance(message, RunFinished):
                self._ignore_end_until = 0.0

    async def _train(self, control: Subscription, stop: asyncio.Event) -> bool:
        """Train one lineage; returns whether to start another one, because the served policy changed."""
        held, ending = self._attachment, asyncio.Event()
        was_served = held.is_served
        self._trainer = trainer = Trainer(self._context_of_next_lineage())
        training = asyncio.create_task(trainer.run(ending))
        try:
            is_changed = await self._follow(control, trainer, training, stop)
        except BaseException:
            training.cancel()
            raise
        finally:
            ending.set()
            # A cancellation during this wait ends the training at once, and is waited for as well.
            await wait_for_tasks([training], on_cancel=training.cancel)
        await self._settle(control, training)
        if is_changed or was_served or not held.is_own:
            return is_changed and not stop.is_set()
        return await self._wait_for_run_end(control, stop)

    def _context_of_next_lineage(self) -> TrainerContext:
        """The context for the trainer of the next lineage, by the current state of control.

        Raises:
            IdentityError: the directory belongs to an instance of another run.
        """
        context, held = self.context, self._attachment
        standing = held.standing(context.settings.ingest.max_served_age)
        own = context.run.identity.load()
        if standing.run_id and own is not None and own.run_id != standing.run_id:
            raise IdentityError(
                f"expected the directory of instance {held.policy} to belong to run {context.run.name} "
                f"({standing.run_id}), got that of another run with this name ({own.run_id}); attach under another "
                f"name, or move {context.run.directory} away"
            )
        parts = context.parts if self.parts_of is None else self.parts_of(held.is_served)
        return replace(context, standing=standing, parts=parts)

    async def _follow(
        self, control: Subscription, trainer: Trainer, training: "asyncio.Task[None]", stop: asyncio.Event
    ) -> bool:
        """Keep the attachment up to date until the trainer must end or has; whether the served policy changed."""
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
                # The broker would confirm nothing: an orderly end would wait for it for minutes.
                training.cancel()
                return False
        if idle:
            log.info("the run is over and all of it was read: ending with a checkpoint")
        return False

    @property
    def _is_over(self) -> bool:
        """Whether the run is over. While the run's own trainer is served, its own last step decides that instead."""
        held = self._attachment
        if (held.is_own or held.is_served) and asyncio.get_running_loop().time() < self._ignore_end_until:
            return False
        return held.run_is_over and not (held.is_own and held.is_served)

    async def _is_drained(self, control: Subscription, trainer: Trainer) -> bool | None:
        """Whether nothing is left to read; None: the broker did not answer."""
        session = trainer.session
        try:
            await control.end_offsets()  # only to see whether the broker answers, while groups read before are trained
            return session is not None and await session.reader.is_drained()
        except BusError as error:
            log.warning("the broker does not say whether anything is left to read", error=str(error))
            return None

    async def _settle(self, control: Subscription, training: "asyncio.Task[None]") -> None:
        error = None if training.cancelled() else training.exception()
        if error is None and not training.cancelled():
            return
        if self._is_over and (error is None or (isinstance(error, BusError) and await self._is_gone(control))):
            log.warning(
                "the run is over and its broker is gone; steps after the last checkpoint are trained again",
                why=str(error),
            )
            return
        assert error is not None, "training is cancelled only after the end of the run"
        raise error

    async def _is_gone(self, control: Subscription) -> bool:
        """Whether the broker stays silent for ``gone_after_s``, so that its error was not a single one."""
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

    async def _wait_for_run_end(self, control: Subscription, stop: asyncio.Event) -> bool:
        """Wait for the run's end, after the run's own trainer has ended while another policy is served.

        The process stays, since its exit would count as the end of the run. Returns when the run is over or stopped;
        True if this policy is served again.
        """
        while not stop.is_set() and not self._is_over:
            await self._poll(control)
            if self._attachment.is_served:
                return not stop.is_set()
        return False
