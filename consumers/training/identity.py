"""A run's identity: a start compares directory, checkpoints and topics, and trains only if they are the same run's.

A run has a UUID as well as a name. The UUID is in the run's directory, in each checkpoint's manifest and on the control
topic, and a start compares the three. It continues only if they agree, or if the topics are still empty.
Invariants, each with a test of its name:
- a_run_name_has_one_holder: the identity is put on the topic by compare-and-set, under one transactional id. If two
  directories start at the same time, one is refused;
- a_lineage_number_is_claimed_once_per_run: the claim is in the same record, written in the same way. If two storages of
  checkpoints claim the same number, one is refused;
- a_refused_start_writes_nothing: neither into the directory nor onto the topics;
- a_directory_without_the_runs_lineages_trains_only_if_adopted: a directory that lacks the lineages on the topics
  continues only with ``--adopt``, and above all of them. If it has no checkpoint, the trajectories of earlier lineages
  are skipped.
"""

import asyncio
import shlex
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import xxhash

from streamrl.bus.history import BusHistory, Extent
from streamrl.bus.port import Bus, Outgoing, Position, message_of
from streamrl.consumers.training.identity_store import IdentityStore
from streamrl.schemas.control import IDENTITY_KEY, MARKER_KEY, RunIdentity, WeightsReady, check_run_identity
from streamrl.schemas.errors import DeliveryUnknown, IdentityError, Superseded
from streamrl.schemas.identifiers import SERVED_POLICY
from streamrl.schemas.messages import WIRE_VERSION, Message, check_wire_version
from streamrl.schemas.reports import RefusedStep, StepReport
from streamrl.schemas.topics import CONTROL, STEPS

# For the types only: processes that keep no checkpoints need no client of object stores.
if TYPE_CHECKING:
    from streamrl.consumers.training.checkpoints.catalogue import CheckpointsState

log = structlog.get_logger()

RUNS = Path("runs")
"""The default parent of runs' directories."""
RECENT_STEPS = 1_000
"""How many offsets at the end of the steps topic are read. Lineages grow along the topic, except for late messages of a
trainer that announces without transactions."""
ATTEMPTS = 20
TOPIC_READS = 3
"""Reads of the topic within one attempt, so that a broker that lags can catch up, or another one answers."""
PAUSE_S = 0.2
"""Seconds before the second attempt; twice that before the third, and so on, to let concurrent starts finish."""


@dataclass(frozen=True)
class TopicsState:
    """What the topics of a name say: the identity, and the newest lineage that was claimed, reported or announced.

    ``end``: the offset up to which the control topic was read (exclusive).
    """

    identity: RunIdentity | None = None
    lineage: int = 0
    end: int = 0


async def read_topics(bus: Bus, run: str, *, only_control: bool = False) -> TopicsState:
    """Read the control topic, and the end of the steps topic unless ``only_control``; missing topics count as empty.

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
    found = TopicsState()
    async with aclosing(history.within(ranges)) as records:
        async for record in records:
            found = _with_message(found, message_of(record))
            if record.topic == control:
                found = replace(found, end=record.offset + 1)
    return found


def _with_message(found: TopicsState, message: Message | None) -> TopicsState:
    match message:
        case RunIdentity():
            return replace(found, identity=message, lineage=max(found.lineage, message.lineage))
        case WeightsReady() if message.trained_by != SERVED_POLICY:
            return found  # another trainer's lineage, on the run's control topic because workers follow that trainer
        case WeightsReady() | StepReport() | RefusedStep():
            return replace(found, lineage=max(found.lineage, message.version.lineage))
        case _:
            return found


@dataclass(frozen=True)
class Start:
    """The facts that decide whether a start may continue.

    ``here``: the identity in the directory. ``fresh``: the identity that the directory gets if it has none.
    ``servers``: the broker as the user named it, None if not named. ``directory``: the parent of runs' directories.
    ``task``: see ``RunIdentity``; empty: the start does not know it.
    """

    run: str
    here: RunIdentity | None
    held: "CheckpointsState"
    topics: TopicsState
    fresh: RunIdentity
    adopt: bool = False
    servers: str | None = None
    directory: Path = RUNS
    task: Mapping[str, str] = field(default_factory=dict)

    @property
    def deletion(self) -> str:
        """The command that deletes the run's topics."""
        if self.servers:
            return f"streamrl topics rm --run {self.run} --bootstrap-servers {self.servers}"
        run = self.run if self.directory == RUNS else shlex.quote(str(self.directory / self.run))
        return f"streamrl topics rm --run {run}"


def decide(start: Start) -> RunIdentity:
    """The identity under which the run may continue; equal to the topics' identity if nothing changes.

    Raises:
        WireVersionError: the wire version of a trainer that held the run is too far from ours.
        IdentityError: the topics belong to another run, or to lineages that are not here.
    """
    if start.topics.identity is not None:
        check_wire_version(f"the trainers of run {start.run}", start.topics.identity.wire)
    identity = _decided(start).with_task(start.task, start.topics.lineage)
    # The newest wire version of all holders: their messages are still on the topics.
    return identity.replace(wire=max(identity.wire, WIRE_VERSION))


def _decided(start: Start) -> RunIdentity:
    here, held, there = start.here, start.held, start.topics.identity
    if held.newest is not None and held.newest.run != start.run:
        raise IdentityError(
            f"expected checkpoints of run {start.run!r} in {held.place}, got those of {held.newest.run!r}; use another "
            "run directory, or another --training.checkpoint_location"
        )
    if here is not None and held.run_id is not None and held.run_id != here.run_id:
        # Refused even with --adopt: weights of one run would continue under the name of another.
        raise IdentityError(
            f"expected the checkpoints in {held.place} to belong to run {start.run} ({here.run_id}), got those of "
            f"another run ({held.run_id}); name their run with --run.name, or other checkpoints with "
            "--training.checkpoint_location"
        )
    own = here.run_id if here is not None else held.run_id
    known = max(held.lineage, here.lineages_before if here is not None else 0)
    is_behind = start.topics.lineage > known or not _knows_claim(start)
    moves_in = here is None and there is not None and own == there.run_id
    holds = here is not None and there is not None and here.has_same_owner_as(there)
    # A start that was taking the run over died after writing the directory and before writing the topic.
    takes_over = here is not None and there is not None and here.succeeds(there)
    is_ours = there is None or moves_in or holds or takes_over
    if is_ours and not is_behind:
        if there is None:
            return here or start.fresh.replace(run_id=own or start.fresh.run_id)
        if takes_over and here is not None:
            return here.replace(lineage=there.lineage, claim_id=there.claim_id)
        # The run's checkpoints, and a directory without an identity, as on another machine that shares the storage.
        return _taken_over(there, start) if moves_in else there
    if not start.adopt:
        raise IdentityError(_refusal(start, is_lost=is_ours))
    return _adopted(start, own)


def _knows_claim(start: Start) -> bool:
    """Whether the newest lineage on the topic was claimed here, or this directory adopted the run without it."""
    here, held, there = start.here, start.held, start.topics.identity
    if there is None or not there.claim_id or there.claim_id == held.claim_id:
        return True
    if there.lineage <= (here.lineages_before if here is not None else 0):
        return True
    # Checkpoints that were moved here without their claims: one of that lineage contains that lineage's work.
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
    # With a checkpoint made since the last adoption without one, this is like a restart after a crash: the frontier
    # says which records are untrained. Without one the run starts from the initial model, and its weights contain
    # nothing of earlier lineages.
    has_progress = checkpoint is not None and checkpoint.lineage > before.orphans_through
    orphans = before.orphans_through if has_progress else lineage
    return _taken_over(before, start).replace(lineages_before=lineage, orphans_through=orphans)


def _taken_over(before: RunIdentity, start: Start) -> RunIdentity:
    return before.replace(adoptions=before.adoptions + 1, holder=start.fresh.holder, since=start.fresh.since)


def _refusal(start: Start, *, is_lost: bool) -> str:
    """One line: the cause, its place, and the three things that a user can do."""
    held, topics, there = start.held, start.topics, start.topics.identity
    # Names no lineage if none has reported yet.
    seen = f" up to lineage {topics.lineage}" if topics.lineage else ""
    at = f" at {start.servers}" if start.servers else ""
    if is_lost:
        have = f"lineage {held.lineage} at most" if held.lineage else "none"
        if held.lineage >= topics.lineage and there is not None:
            have = f"lineage {there.lineage} of another start"
        finding = (
            f"expected the checkpoints of run {start.run} in {held.place}, found {have}, while its topics{at} hold a "
            f"run{seen}: the checkpoints were lost, or are elsewhere"
        )
    else:
        assert there is not None, "without an identity on the topics a start can only lack their lineages"
        mine = start.fresh.holder
        if start.here is None and there.holder == mine:
            finding = (
                f"expected run {there.run_id} in {mine}, as the topics of {start.run}{at} say{seen}, found nothing of "
                "it there: the directory was lost or emptied"
            )
        else:
            ours = f"run {start.here.run_id}" if start.here is not None else "no run"
            taken = start.here is not None and start.here.run_id == there.run_id
            how = "was taken over by" if taken else "is held by"
            finding = (
                f"expected the topics of {start.run}{at} to be those of {mine}, which has {ours}, found run "
                f"{there.run_id}{seen}, which {how} {there.holder or 'a directory that is not named'}"
            )
    if held.newest is not None and (held.run_id is None or there is None or held.run_id == there.run_id):
        adopting = f"continues here from step {held.newest.step}"
    else:
        adopting = "starts here with the initial model, above all earlier lineages, and skips their trajectories"
    return f"{finding}; --adopt {adopting}; --run.name starts another run; `{start.deletion}` deletes the topics"


LookUp = Callable[[int], Awaitable["CheckpointsState"]]
"""Reads the present state of the checkpoints' storage, with the claim of the given lineage."""


@dataclass
class IdentityKeeper:
    """Keeps one directory's hold on the name of a run; ``identity``: the identity held.

    ``servers``: the broker as the user named it, for messages. ``run_id``: the run that the directory must belong to;
    empty: it may choose. ``task``: see ``RunIdentity``; only the start that creates or continues the run knows it.
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
    task: Mapping[str, str] = field(default_factory=dict)
    identity: RunIdentity | None = field(default=None, init=False)
    _held: LookUp | None = field(default=None, init=False)

    async def look(self, held: LookUp) -> RunIdentity:
        """The identity that ``hold`` would return; writes nothing.

        Raises:
            IdentityError: see ``decide``.
            BusUnavailable: no broker answers.
        """
        start = await self._start(held)
        return decide(start)

    async def hold(self, held: LookUp) -> RunIdentity:
        """Make this directory the name's holder, if the name is free, its own or to be adopted; returns the identity.

        Raises:
            IdentityError: see ``decide``; directory and topics are unchanged.
            BusError: no broker answers, or it does not accept the identity.
        """
        kept = None
        for attempt in range(1, ATTEMPTS + 1):
            start = await self._start(held)
            try:
                wanted = decide(start)
            except IdentityError:
                # Another directory was quicker: restore what the directory held before the attempt.
                there = start.topics.identity
                if kept is not None and (there is None or not there.has_same_owner_as(kept[1])):
                    self.store.swap(kept[1], kept[0])
                raise
            # The directory is written first: after a crash in between, the next start finds its own identity there. The
            # lineage is kept on the topic only.
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
        """Put a lineage that was claimed in the checkpoints' storage on the topic, where all storages of a run claim.

        Raises:
            Superseded: another directory, or a newer lineage of this one, has the run.
            IdentityError: a lineage was put on the topic in the meantime that was not claimed in this storage.
            BusError: no broker answers, or it does not accept the claim.
        """
        # The identity as ``hold`` left it on the topic: if it is unchanged, no other start has come in between.
        identity, held = self.identity, self._held
        assert identity is not None, "call hold before claim"
        assert held is not None, "call hold before claim"
        before: RunIdentity | None = identity
        for attempt in range(1, ATTEMPTS + 1):
            wanted = (before or identity).replace(lineage=lineage, claim_id=claim_id)
            if await self._put(wanted, before):
                self.identity = wanted
                log.info("lineage claimed", lineage=lineage, claim_id=claim_id)
                return
            await self._pause(attempt)
            start = await self._start(held)
            self._check_holder(start.topics.identity)
            if start.topics.identity == wanted:
                continue  # the claim is there, although no attempt was confirmed
            # Refused even with --adopt: two lineages would have the same number.
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
            f"{ATTEMPTS} attempts; check the broker, and that nothing else keeps starting a run of this name"
        )

    async def check(self, lineage: int) -> None:
        """Check that no other directory has taken the run over, and that no newer lineage exists.

        Raises:
            Superseded: another directory or a newer lineage has the run.
            BusUnavailable: no broker answers.
        """
        found = await read_topics(self.bus, self.run)
        self._check_holder(found.identity)
        self._check_newest(lineage, found.lineage)

    def _check_holder(self, found: RunIdentity | None) -> None:
        identity = self.identity
        assert identity is not None, "call hold before check"
        if found is not None and not found.has_same_owner_as(identity):
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
        # Topics first, checkpoints second: a lineage is claimed in the storage before it is put on the topic. So any
        # lineage seen on the topic is also seen in the storage, even if another process claims one in between.
        topics = await read_topics(self.bus, self.run)
        checkpoints = await held(topics.identity.lineage if topics.identity is not None else 0)
        asked = self.adopt, self.servers, self.directory, self.task
        return Start(self.run, self.store.load(), checkpoints, topics, fresh, *asked)

    async def _put(self, wanted: RunIdentity, before: RunIdentity | None) -> bool:
        """Put the identity on the topic if that still says ``before``; false: not written, so read and try again."""
        # Opening the id ends every older attempt, so the identity read below cannot change before the commit.
        publisher = await self.bus.transactional(f"{self.run}.identity")
        try:
            topics = await self._read_past(await self._write_mark())
            if topics is None:
                return False
            found = topics.identity
            if found == wanted:
                return True  # written by an earlier attempt that was not confirmed
            if found != before:
                return False
            await publisher.commit([Outgoing.of(CONTROL.full_name(self.run), wanted, key=IDENTITY_KEY)])
        except (Superseded, DeliveryUnknown) as error:
            log.warning("identity not confirmed, reading again", error=str(error))
            return False
        finally:
            await publisher.close()
        return True

    async def _read_past(self, mark: Position) -> TopicsState | None:
        """What the control topic says at least up to ``mark``; None if no broker that answered has that record.

        A broker that is cut off from the others believes that it still leads, and lacks the records that they accepted.
        """
        for attempt in range(1, TOPIC_READS + 1):
            topics = await read_topics(self.bus, self.run, only_control=True)
            if topics.end > mark.offset:
                return topics
            log.warning("the broker that answered lags, reading again", mark=mark.offset, end=topics.end)
            await self._pause(attempt)
        return None

    async def _write_mark(self) -> Position:
        """Write an empty record to the control topic, after everything already there; returns its position."""
        publisher = await self.bus.publisher(f"{self.run}-identity")
        try:
            return await publisher.publish(Outgoing(CONTROL.full_name(self.run), None, MARKER_KEY))
        finally:
            await publisher.close()


async def refuse_other_run(bus: Bus, run: str, store: IdentityStore) -> None:
    """Check that a process that joins a run understands its messages, and that it is not another run of the same name.

    A process whose directory has no identity, as on another machine, joins the run that is on the topics.

    Raises:
        WireVersionError: the wire version of the run's trainer is too far from ours.
        IdentityError: the topics and the directory belong to different runs.
        BusUnavailable: no broker answers.
    """
    own = store.load()
    if (found := (await read_topics(bus, run, only_control=True)).identity) is not None:
        check_run_identity(run, own.run_id if own is not None else None, found)


def here(directory: Path) -> str:
    """Host and directory as text that fits into an identity (its last 256 characters)."""
    return f"{socket.gethostname()}:{directory.absolute()}"[-256:]
