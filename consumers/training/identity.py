"""Which run this is: what a directory, its checkpoints and the topics of a name say, before anything is trained.

A run has a UUID beside its name. It stands in the run's directory, in each checkpoint's manifest and on the control
topic, and a start compares the three. Only where they agree, or where nothing is on the topics yet, does it go on.
Invariants, each with a test of its name:
- a_name_has_one_holder: the identity is put on the topic by compare-and-set, in a transaction of one id, so that of
  two directories that start at the same time one is refused;
- a_lineage_is_given_once_to_a_run: as well on the topic, in the same record and in the same way, so that of two places
  of checkpoints that claim the same number one is refused;
- a_refused_start_writes_nothing: neither into the directory nor onto the topics;
- an_old_life_is_never_trained_silently: a directory without the lineages that the topics have seen goes on only when
  it was told to adopt the run, above all of them; if it has no checkpoint, what they sampled is skipped.
"""

import asyncio
import shlex
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import xxhash

from streamrl.bus.history import BusHistory, Extent
from streamrl.bus.port import Bus, Outgoing, Position, message_of
from streamrl.consumers.training.identity_store import IdentityStore
from streamrl.schemas.control import IDENTITY_KEY, SEEN_KEY, RunIdentity, WeightsReady, refuse_stranger
from streamrl.schemas.errors import DeliveryUnknown, IdentityError, Superseded
from streamrl.schemas.identifiers import SERVED_POLICY
from streamrl.schemas.messages import WIRE_VERSION, Message, refuse_far_version
from streamrl.schemas.reports import RefusedStep, StepReport
from streamrl.schemas.topics import CONTROL, STEPS

# Only its facts are looked at here, and processes that keep no checkpoints need no client of object stores.
if TYPE_CHECKING:
    from streamrl.consumers.training.checkpoints.catalogue import HeldCheckpoints

log = structlog.get_logger()

RUNS = Path("runs")
"""Where runs have their directories unless told otherwise."""
RECENT_STEPS = 1_000
"""Offsets at the end of the steps topic that are read: lineages only grow along it, but for the last words of a trainer
that announces without transactions."""
ATTEMPTS = 20
LOOKS = 3
"""At the topic within one attempt: a node that lags behind for a moment catches up, or another one is asked."""
PAUSE_S = 0.2
"""Between attempts, once and twice and so on: others that start at the same time get through meanwhile."""


@dataclass(frozen=True)
class HeldTopics:
    """What the topics of a name say: the identity, and the newest lineage that was given out, reported or announced.

    ``end``: the offset up to which the control topic was read.
    """

    identity: RunIdentity | None = None
    lineage: int = 0
    end: int = 0


async def read_topics(bus: Bus, run: str, *, only_control: bool = False) -> HeldTopics:
    """Read control, and unless only that is wanted the end of steps; nothing is found where a topic is missing.

    Raises:
        BusUnavailable: no broker answers.
    """
    control, steps = CONTROL.full_name(run), STEPS.full_name(run)
    history = BusHistory(bus, client_id=f"{run}-identity")
    extents = await history.extents(*((control,) if only_control else (control, steps)))
    ranges = {
        tp: Extent(max(held.first, held.end - RECENT_STEPS), held.end) if tp.topic == steps else held
        for tp, held in extents.items()
    }
    found = HeldTopics()
    async with aclosing(history.within(ranges)) as records:
        async for record in records:
            found = _noted(found, message_of(record))
            if record.topic == control:
                found = replace(found, end=record.offset + 1)
    return found


def _noted(found: HeldTopics, message: Message | None) -> HeldTopics:
    match message:
        case RunIdentity():
            return replace(found, identity=message, lineage=max(found.lineage, message.lineage))
        case WeightsReady() if message.trained_by != SERVED_POLICY:
            return found  # a lineage of another trainer's, on the run's control since workers follow it
        case WeightsReady() | StepReport() | RefusedStep():
            return replace(found, lineage=max(found.lineage, message.version.lineage))
        case _:
            return found


@dataclass(frozen=True)
class Start:
    """What a start would do, and with what: the facts behind a decision.

    ``here``: what the directory keeps; ``fresh``: the identity that it gets if it has none; ``servers``: the broker as
    the user named it, if so; ``directory``: where its runs have their directories.
    """

    run: str
    here: RunIdentity | None
    held: "HeldCheckpoints"
    topics: HeldTopics
    fresh: RunIdentity
    adopt: bool = False
    servers: str | None = None
    directory: Path = RUNS

    @property
    def deletion(self) -> str:
        """The command that deletes what is on the topics."""
        command = f"streamrl topics delete --run {self.run}"
        if self.servers:
            return f"{command} --bootstrap-servers {self.servers}"
        return command if self.directory == RUNS else f"{command} --directory {shlex.quote(str(self.directory))}"


def decide(start: Start) -> RunIdentity:
    """The identity under which the run may go on; equal to that on the topics if it goes on as it is.

    Raises:
        WireVersionError: a trainer held the run whose wire version is too far from ours.
        IdentityError: the topics are those of another run, or of lineages that are not here.
    """
    if start.topics.identity is not None:
        refuse_far_version(f"the trainers of run {start.run}", start.topics.identity.wire)
    identity = _decided(start)
    # Of the newest that ever held it: what that one wrote is still on the topics.
    return identity.replace(wire=max(identity.wire, WIRE_VERSION))


def _decided(start: Start) -> RunIdentity:
    here, held, there = start.here, start.held, start.topics.identity
    if held.newest is not None and held.newest.run != start.run:
        raise IdentityError(
            f"expected checkpoints of run {start.run!r} in {held.place}, got those of {held.newest.run!r}; use another "
            "run directory, or another --training.checkpoint_location"
        )
    if here is not None and held.run_id is not None and held.run_id != here.run_id:
        # Not even when it adopts: weights of one run would go on under the name of another.
        raise IdentityError(
            f"expected the checkpoints in {held.place} to belong to run {start.run} ({here.run_id}), got those of "
            f"another run ({held.run_id}); name their run with --run.name, or other checkpoints with "
            "--training.checkpoint_location"
        )
    own = here.run_id if here is not None else held.run_id
    known = max(held.lineage, here.lineages_before if here is not None else 0)
    is_behind = start.topics.lineage > known or not _knows_claim(start)
    moves_in = here is None and there is not None and own == there.run_id
    holds = here is not None and there is not None and here.is_held_like(there)
    # A start that was taking the run over died between the directory and the topic.
    takes_over = here is not None and there is not None and here.succeeds(there)
    is_ours = there is None or moves_in or holds or takes_over
    if is_ours and not is_behind:
        if there is None:
            return here or start.fresh.replace(run_id=own or start.fresh.run_id)
        if takes_over and here is not None:
            return here.replace(lineage=there.lineage, claim_id=there.claim_id)
        # The checkpoints of it in a directory without an identity, as on another machine that shares their storage.
        return _taken_over(there, start) if moves_in else there
    if not start.adopt:
        raise IdentityError(_refusal(start, is_lost=is_ours))
    return _adopted(start, own)


def _knows_claim(start: Start) -> bool:
    """Whether the newest lineage that the topic gave out was claimed here, or is one that the run goes on without."""
    here, held, there = start.here, start.held, start.topics.identity
    if there is None or not there.claim_id or there.claim_id == held.claim_id:
        return True
    if there.lineage <= (here.lineages_before if here is not None else 0):
        return True
    # Moved here without their claims: who has a checkpoint of that lineage has what it did.
    return held.newest is not None and held.run_id == there.run_id and held.newest.lineage >= there.lineage


def _adopted(start: Start, own: str | None) -> RunIdentity:
    held, there = start.held, start.topics.identity
    checkpoint = held.newest
    if there is not None and held.run_id is not None and held.run_id != there.run_id:
        raise IdentityError(
            f"expected --adopt to find no checkpoint in {held.place}, or one of the run on the topics "
            f"({there.run_id}), got those of another run ({held.run_id}): move them away to adopt without them, or "
            "name their run with --run.name"
        )
    before = there or start.fresh.replace(run_id=own or start.fresh.run_id)
    lineage = max(start.topics.lineage, held.lineage)
    # With a checkpoint of the life that went on last, all is as after a crash: the frontier says what is untrained.
    # Without one the run begins anew, and nothing of its earlier lineages is in the weights.
    goes_on = checkpoint is not None and checkpoint.lineage > before.orphans_through
    orphans = before.orphans_through if goes_on else lineage
    return _taken_over(before, start).replace(lineages_before=lineage, orphans_through=orphans)


def _taken_over(before: RunIdentity, start: Start) -> RunIdentity:
    return before.replace(adoptions=before.adoptions + 1, holder=start.fresh.holder, since=start.fresh.since)


def _refusal(start: Start, *, is_lost: bool) -> str:
    """One line: what was found where, and the three ways on."""
    held, topics, there = start.held, start.topics, start.topics.identity
    # No lineage is named where none has reported yet.
    seen = f" up to lineage {topics.lineage}" if topics.lineage else ""
    at = f" at {start.servers}" if start.servers else ""
    if is_lost:
        have = f"lineage {held.lineage} at most" if held.lineage else "none"
        if held.lineage >= topics.lineage and there is not None:
            have = f"lineage {there.lineage} of another start"
        told = (
            f"expected the checkpoints of run {start.run} in {held.place}, found {have}, while its topics{at} hold a "
            f"run{seen}: they were lost, or are elsewhere"
        )
    else:
        assert there is not None, "without an identity on the topics a start can only lack their lineages"
        mine = start.fresh.holder
        if start.here is None and there.holder == mine:
            told = (
                f"expected run {there.run_id} in {mine}, as the topics of {start.run}{at} say{seen}, found nothing of "
                "it there: the directory was lost or emptied"
            )
        else:
            ours = f"run {start.here.run_id}" if start.here is not None else "no run"
            taken = start.here is not None and start.here.run_id == there.run_id
            how = "was taken over by" if taken else "is held by"
            told = (
                f"expected the topics of {start.run}{at} to be those of {mine}, which has {ours}, found run "
                f"{there.run_id}{seen}, which {how} {there.holder or 'a directory that is not named'}"
            )
    if held.newest is not None and (held.run_id is None or there is None or held.run_id == there.run_id):
        adopting = f"goes on here from step {held.newest.step}"
    else:
        adopting = "begins here with the initial model, above all earlier lineages, and skips what they sampled"
    return (
        f"{told}; --adopt {adopting}; --run.name begins another run; `{start.deletion}` deletes what is on the topics"
    )


LookUp = Callable[[int], Awaitable["HeldCheckpoints"]]
"""Looks at the place of the checkpoints, as it is at that moment, and at the claim of one lineage."""


@dataclass
class IdentityKeeper:
    """One directory's hold on the name of a run; ``identity``: what it holds. ``servers``: the broker as the user named
    it, for messages. ``run_id``: of the run that it is to belong to, if that is not its own to say.
    """

    bus: Bus
    run: str
    store: IdentityStore
    adopt: bool = False
    servers: str | None = None
    directory: Path = RUNS
    clock: Callable[[], float] = time.time
    holder: str = field(default_factory=lambda: here(Path.cwd()))
    run_id: str = ""
    identity: RunIdentity | None = field(default=None, init=False)
    _held: LookUp | None = field(default=None, init=False)

    async def look(self, held: LookUp) -> RunIdentity:
        """What ``hold`` would come to, without writing anything.

        Raises:
            IdentityError: see ``decide``.
            BusUnavailable: no broker answers.
        """
        start = await self._start(held)
        return decide(start)

    async def hold(self, held: LookUp) -> RunIdentity:
        """Make sure that this directory holds the name, taking it where that is free or told; the identity.

        Raises:
            IdentityError: see ``decide``; directory and topics are as they were.
            BusError: no broker answers, or it does not take the identity.
        """
        kept = None
        for attempt in range(1, ATTEMPTS + 1):
            start = await self._start(held)
            try:
                wanted = decide(start)
            except IdentityError:
                # Another directory was quicker: what was kept for the attempt goes again.
                there = start.topics.identity
                if kept is not None and (there is None or not there.is_held_like(kept[1])):
                    self.store.swap(kept[1], kept[0])
                raise
            # In the directory first: a start that dies in between finds its own name, and not that of a stranger. Which
            # lineages were given out is the topic's to say.
            own = wanted.replace(lineage=0, claim_id="")
            if own == start.here or self.store.swap(start.here, own):
                kept = kept if own == start.here else (start.here, own)
                if wanted == start.topics.identity or await self._put(wanted, start.topics.identity):
                    log.info("run held", run_id=wanted.run_id, adoptions=wanted.adoptions, holder=wanted.holder)
                    self.identity, self._held = wanted, held
                    return wanted
            await self._pause(attempt)
        raise self._unconfirmed("the identity")

    async def claim(self, lineage: int, claim_id: str) -> None:
        """Put a lineage that was claimed beside the checkpoints on the topic, where all places of them claim.

        Raises:
            Superseded: another directory, or a newer lineage of this one, has the run.
            IdentityError: a lineage was given out meanwhile that was not claimed beside these checkpoints.
            BusError: no broker answers, or it does not take the claim.
        """
        # What the topic said when this directory was found to hold the run: if it says so still, nobody came between.
        identity, held = self.identity, self._held
        assert identity is not None, "held before a lineage of it is claimed"
        assert held is not None, "looked at before a lineage of it is claimed"
        before: RunIdentity | None = identity
        for attempt in range(1, ATTEMPTS + 1):
            wanted = (before or identity).replace(lineage=lineage, claim_id=claim_id)
            if await self._put(wanted, before):
                self.identity = wanted
                log.info("lineage given out", lineage=lineage, claim_id=claim_id)
                return
            await self._pause(attempt)
            start = await self._start(held)
            self._check_holder(start.topics.identity)
            if start.topics.identity == wanted:
                continue  # it was confirmed to nobody, and is there
            # Not even when it adopts: its number would be that other lineage's, too.
            decide(replace(start, adopt=False))
            self._check_newest(lineage, start.topics.lineage)
            before = start.topics.identity
        raise self._unconfirmed(f"lineage {lineage}")

    async def _pause(self, attempt: int) -> None:
        slower = xxhash.xxh32_intdigest(self.holder.encode()) % 8 / 8
        await asyncio.sleep(PAUSE_S * attempt * (1 + slower))

    def _unconfirmed(self, what: str) -> DeliveryUnknown:
        return DeliveryUnknown(
            f"expected to put {what} of run {self.run} on {CONTROL.full_name(self.run)}, got no confirmation in "
            f"{ATTEMPTS} attempts; check the broker, and that nobody else starts a run of this name all the time"
        )

    async def check(self, lineage: int) -> None:
        """Make sure that no other directory has taken the run over, nor a newer lineage begun anywhere.

        Raises:
            Superseded: one has.
            BusUnavailable: no broker answers.
        """
        found = await read_topics(self.bus, self.run)
        self._check_holder(found.identity)
        self._check_newest(lineage, found.lineage)

    def _check_holder(self, found: RunIdentity | None) -> None:
        identity = self.identity
        assert identity is not None, "held before it is checked"
        if found is not None and not found.is_held_like(identity):
            raise Superseded(
                f"expected run {self.run} ({identity.run_id}) to be held by {identity.holder}, found it held by "
                f"{found.holder} ({found.run_id}): superseded; let that one go on"
            )

    def _check_newest(self, lineage: int, found: int) -> None:
        if found > lineage:
            raise Superseded(
                f"expected lineage {lineage} of run {self.run} to be the newest on its topics, found {found}: "
                "superseded, another trainer has taken over this run; let it go on"
            )

    async def _start(self, held: LookUp) -> Start:
        run_id = self.run_id or str(uuid.uuid4())
        fresh = RunIdentity(run_id=run_id, holder=self.holder, wire=WIRE_VERSION, since=self.clock())
        # In this order: a lineage is claimed here before the topics hear of it, so whatever another process of this
        # directory does meanwhile, nothing is missed here that was seen there.
        topics = await read_topics(self.bus, self.run)
        checkpoints = await held(topics.identity.lineage if topics.identity is not None else 0)
        return Start(self.run, self.store.load(), checkpoints, topics, fresh, self.adopt, self.servers, self.directory)

    async def _put(self, wanted: RunIdentity, before: RunIdentity | None) -> bool:
        """Put it on the topic if that still says ``before``; true if it is there, false: look again."""
        # Opening the id ends every older attempt, so that what is read below holds until the commit.
        publisher = await self.bus.transactional(f"{self.run}.identity")
        try:
            topics = await self._read_behind(await self._marked())
            if topics is None:
                return False
            found = topics.identity
            if found == wanted:
                return True  # by an earlier attempt that was not confirmed
            if found != before:
                return False
            await publisher.commit([Outgoing.of(CONTROL.full_name(self.run), wanted, key=IDENTITY_KEY)])
        except (Superseded, DeliveryUnknown) as error:
            log.warning("identity not confirmed, looking again", error=str(error))
            return False
        finally:
            await publisher.close()
        return True

    async def _read_behind(self, mark: Position) -> HeldTopics | None:
        """What the control topic says up to ``mark`` at least; None if nobody that was asked has got there.

        A node that is cut off from the others believes that it leads still, and does not know what they took.
        """
        for attempt in range(1, LOOKS + 1):
            topics = await read_topics(self.bus, self.run, only_control=True)
            if topics.end > mark.offset:
                return topics
            log.warning("a node that lags behind was read, looking again", mark=mark.offset, end=topics.end)
            await self._pause(attempt)
        return None

    async def _marked(self) -> Position:
        """A place on the control topic behind everything that was there when this was called."""
        publisher = await self.bus.publisher(f"{self.run}-identity")
        try:
            return await publisher.publish(Outgoing(CONTROL.full_name(self.run), None, SEEN_KEY))
        finally:
            await publisher.close()


async def refuse_other_run(bus: Bus, run: str, store: IdentityStore) -> None:
    """Make sure that a process that only joins a run understands it, and does not join another of the same name.

    A directory that says nothing, as on another machine, joins whatever run there is.

    Raises:
        WireVersionError: the run's trainer is of a wire version too far from ours.
        IdentityError: the topics are those of another run than the directory.
        BusUnavailable: no broker answers.
    """
    own = store.load()
    if (found := (await read_topics(bus, run, only_control=True)).identity) is not None:
        refuse_stranger(run, own.run_id if own is not None else None, found)


def here(directory: Path) -> str:
    """Host and directory, in words that fit into an identity."""
    return f"{socket.gethostname()}:{directory.absolute()}"[-256:]
