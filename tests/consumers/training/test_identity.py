"""Whose run the topics of a name are: trainers on a bus in memory, in one directory, in another, and without one."""

import asyncio
import json
import shutil
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from streamrl.bus.history import BusHistory
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.memory import MemoryBus, MemorySubscription
from streamrl.bus.port import Record, TopicPartition
from streamrl.consumers.training import trainer as trainer_module
from streamrl.consumers.training.checkpoints.catalogue import (
    CheckpointsState,
    Lineage,
    claim_lineage,
    read_checkpoints_state,
)
from streamrl.consumers.training.checkpoints.manifest import CheckpointManifest, decode_manifest, encode_manifest
from streamrl.consumers.training.checkpoints.storage import CheckpointStorage, open_storage
from streamrl.consumers.training.identity import (
    IdentityKeeper,
    Start,
    TopicsState,
    decide,
    read_topics,
    refuse_other_run,
)
from streamrl.consumers.training.identity_store import IdentityFile, MemoryIdentity
from streamrl.inspection.audit.audit import audit
from streamrl.inspection.audit.report import AuditReport
from streamrl.schemas.control import IDENTITY_KEY, RunIdentity
from streamrl.schemas.errors import IdentityError, Superseded, UserError, WireVersionError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.messages import WIRE_VERSION
from streamrl.schemas.reports import SkipReason
from streamrl.schemas.topics import CONTROL, STEPS
from tests.broker_fixture import unique_numbers
from tests.consumers.training.trainer_harness import RUN, TRAINING, TrainerHarness, group
from tests.contract.topics import create_topic
from tests.fakes.topics import send
from tests.progress import within

_numbers = unique_numbers()
WAYS = ("--adopt", "--run.name", f"`streamrl topics rm --run {RUN}`")


@pytest.fixture
def harness(tmp_path: Path, model_path: Path) -> TrainerHarness:
    return TrainerHarness.make(tmp_path / "first", model_path)


def elsewhere(harness: TrainerHarness, name: str = "second") -> TrainerHarness:
    """Another directory, on the same topics."""
    return TrainerHarness(harness.bus, harness.root.parent / name, harness.model_path)


def records(bus: MemoryBus) -> dict[str, int]:
    return {name: sum(map(len, log.partitions)) for name, log in bus.logs.items()}


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


async def nowhere(claimed: int = 0) -> CheckpointsState:
    return NOWHERE


async def audited(harness: TrainerHarness) -> AuditReport:
    return await audit(BusHistory(harness.bus), RUN, harness.store().manifests)


async def train(harness: TrainerHarness, lineage: int, number: int, **changes: Any) -> None:
    """A trainer that is stopped once it has reached a version."""
    async with harness.running(harness.trainer(**changes)):
        await harness.until_version(lineage, number)


async def a_life(harness: TrainerHarness) -> None:
    """Two steps of four groups, and two groups that nobody trained."""
    for index in range(6):
        await harness.publish_group(index)
    await train(harness, 1, 2, training=TRAINING.model_copy(update={"max_steps": 2}))


async def refused(harness: TrainerHarness) -> str:
    """What a trainer here ends with, having written nothing."""
    before, there = records(harness.bus), files(harness.root)
    with pytest.raises(IdentityError) as told:
        await within(harness.trainer().run(asyncio.Event()), 20)
    assert (told.value.exit_code, records(harness.bus), files(harness.root)) == (2, before, there)
    return str(told.value)


async def test_a_directory_without_the_runs_lineages_trains_only_if_adopted_and_a_refused_start_writes_nothing(
    harness: TrainerHarness,
) -> None:
    await a_life(harness)
    text = await refused(elsewhere(harness))
    assert all(way in text for way in WAYS), text
    assert "up to lineage 1" in text
    assert str(harness.root) in text
    assert "\n" not in text


async def test_a_directory_lost_after_a_second_lineage_is_refused_without_waiting(
    harness: TrainerHarness,
) -> None:
    await a_life(harness)
    await train(harness, 2, 2)
    assert "up to lineage 2" in await refused(elsewhere(harness))


async def test_checkpoints_that_were_lost_from_their_directory_are_missed(harness: TrainerHarness) -> None:
    await a_life(harness)
    (harness.root / "checkpoints").rename(harness.root / "elsewhere")
    text = await refused(harness)
    assert all(way in text for way in WAYS), text
    assert "checkpoints, found none" in text


async def test_an_adopted_run_begins_above_all_lineages_and_trains_nothing_of_the_earlier_life(
    harness: TrainerHarness,
) -> None:
    await a_life(harness)
    await train(harness, 2, 2)
    second = elsewhere(harness)
    for index in range(6, 8):
        await second.publish_group(index, version=PolicyVersion(3, 0))
    steps = TRAINING.model_copy(update={"max_steps": 1})
    await train(second, 3, 1, training=steps, adopt=True)
    first_life = {sample.trajectory_id for number in range(6) for sample in group(number)}
    skipped = {row.trajectory_id: row.reason for row in second.skips() if row.lineage == 3}
    assert skipped == dict.fromkeys(first_life, SkipReason.ORPHAN_LINEAGE)
    assert set(second.trained_ids(3)) == {f"p/{number}/0/{index}" for number in (6, 7) for index in (0, 1)}
    verdict = await audited(second)
    (own,) = verdict.algorithms
    assert not own.violations
    assert (own.produced, own.trained, own.skipped, own.pending) == (16, 4, {"orphan_lineage": 12}, 0)
    assert await refused(harness)


async def test_a_trainer_killed_before_its_first_checkpoint_skips_the_earlier_life_again(
    harness: TrainerHarness,
) -> None:
    await a_life(harness)
    second = elsewhere(harness)
    await train(second, 2, 0, adopt=True)
    # Without the option, as a supervisor would: the directory holds the run.
    await train(second, 3, 0)
    await second.until(lambda: sum(row.lineage == 3 for row in second.skips()) == 12)
    assert {row.reason for row in second.skips()} == {SkipReason.ORPHAN_LINEAGE}


async def test_an_adopted_run_goes_on_from_the_checkpoint_that_is_there(harness: TrainerHarness) -> None:
    await a_life(harness)
    second = elsewhere(harness)
    # A backup: of the checkpoints, and not of the lineages claimed.
    second.root.mkdir()
    shutil.copytree(harness.root / "checkpoints" / "step_2", second.root / "checkpoints" / "step_2")
    await train(harness, 2, 2)
    assert "continues here from step 2" in await refused(second)
    await train(second, 3, 3, adopt=True)
    assert second.skips() == []
    verdict = await audited(second)
    assert not verdict.algorithms[0].violations
    assert verdict.algorithms[0].trained == 12


async def test_a_second_directory_is_refused_while_the_first_one_runs(harness: TrainerHarness) -> None:
    async with harness.running(harness.trainer()):
        epochs = dict(harness.bus.epochs)
        await refused(elsewhere(harness))
        assert harness.bus.epochs == epochs, "nobody was fenced"
        for index in range(2):
            await harness.publish_group(index)
        await harness.until_version(1, 1)


async def test_a_run_name_has_one_holder(harness: TrainerHarness) -> None:
    """Though both found the name free."""
    stores = [MemoryIdentity(), MemoryIdentity()]
    keepers = [IdentityKeeper(harness.bus, RUN, store, holder=f"h:{n}") for n, store in enumerate(stores)]
    outcomes = await asyncio.gather(*(keeper.hold(nowhere) for keeper in keepers), return_exceptions=True)
    won = [outcome for outcome in outcomes if isinstance(outcome, RunIdentity)]
    lost = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, IdentityError)]
    assert (len(won), len(lost)) == (1, 1), outcomes
    assert stores[lost[0]].identity is None, "a refused start leaves nothing"
    assert [m for m in harness.messages(CONTROL.name) if isinstance(m, RunIdentity)] == won


@dataclass
class Place:
    """A directory as its trainers use it: what it says of the run, and its checkpoints."""

    keeper: IdentityKeeper
    storage: CheckpointStorage

    @classmethod
    def make(
        cls, harness: TrainerHarness, name: str, identity: MemoryIdentity | None = None, *, adopt: bool = False
    ) -> "Place":
        store = identity or MemoryIdentity()
        keeper = IdentityKeeper(harness.bus, RUN, store, adopt=adopt, holder=f"h:{name}")
        return cls(keeper, open_storage(harness.root.parent / name, harness.root))

    async def hold(self) -> RunIdentity:
        async def look(claimed: int) -> CheckpointsState:
            return read_checkpoints_state(self.storage, claimed)

        return await self.keeper.hold(look)

    def claimed(self) -> Lineage:
        """The next lineage, as far as this place knows."""
        assert self.keeper.identity is not None
        return claim_lineage(self.storage, at_least=self.keeper.identity.lineages_before + 1, now=0.0)

    async def put(self, lineage: Lineage) -> None:
        await self.keeper.claim(lineage.number, lineage.claim_id)


def given_out(harness: TrainerHarness) -> list[tuple[int, str]]:
    """Lineages as the topic has them, with the places that they went to."""
    found = [m for m in harness.messages(CONTROL.name) if isinstance(m, RunIdentity)]
    return list(dict.fromkeys((each.lineage, each.holder) for each in found if each.lineage))


@pytest.mark.parametrize("first", ["the claim", "the adoption"])
async def test_a_run_adopted_while_a_lineage_is_claimed_gives_no_number_twice(
    harness: TrainerHarness, first: str
) -> None:
    """The older trainer has claimed beside its checkpoints and reported nothing yet."""
    older, newer = Place.make(harness, "a"), Place.make(harness, "b", adopt=True)
    await older.hold()
    lineage = older.claimed()
    if first == "the claim":
        await older.put(lineage)
        await newer.hold()
    else:
        await newer.hold()
        with pytest.raises(Superseded, match="h:b"):
            await older.put(lineage)
    later = newer.claimed()
    await newer.put(later)
    own = [(lineage.number, "h:a")] if first == "the claim" else []
    assert given_out(harness) == [*own, *[(number, "h:b") for number, _ in own], (later.number, "h:b")]
    assert len({number for number, _ in own} | {later.number}) == len(own) + 1


async def test_an_adoption_that_has_looked_before_a_lineage_was_claimed_looks_again(harness: TrainerHarness) -> None:
    older, newer = Place.make(harness, "a"), Place.make(harness, "b", adopt=True)
    await older.hold()
    lineage, looked = older.claimed(), asyncio.Event()

    async def look(claimed: int) -> CheckpointsState:
        if not looked.is_set():
            looked.set()
            await older.put(lineage)
        return read_checkpoints_state(newer.storage, claimed)

    assert (await newer.keeper.hold(look)).lineages_before == lineage.number


@dataclass
class LaggingBus(MemoryBus):
    """As read from a node that the others have left behind: the control topic ends at ``end`` for some polls more."""

    end: int = 0
    polls: int = 3

    async def subscribe(self, *arguments: Any, **options: Any) -> MemorySubscription:
        found = await super().subscribe(*arguments, **options)
        return LaggingSubscription(self, found.offsets, None)


class LaggingSubscription(MemorySubscription):
    bus: LaggingBus

    def _take(self, max_records: int) -> list[Record]:
        self.bus.polls -= 1
        taken = super()._take(max_records)
        return [record for record in taken if self._is_known(record)]

    def _is_known(self, record: Record) -> bool:
        if self.bus.polls < 0 or record.topic != CONTROL.full_name(RUN) or record.offset < self.bus.end:
            return True
        tp = TopicPartition(record.topic, record.partition)
        self.offsets[tp] = min(self.offsets[tp], self.bus.end)
        return False

    async def end_offsets(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
        ends, lags = await super().end_offsets(partitions), self.bus.polls >= 0
        control = CONTROL.full_name(RUN)
        return {tp: min(end, self.bus.end) if lags and tp.topic == control else end for tp, end in ends.items()}


async def test_a_lagging_node_is_waited_for_before_a_lineage_is_claimed(harness: TrainerHarness) -> None:
    older, newer = Place.make(harness, "a"), Place.make(harness, "b", adopt=True)
    await older.hold()
    lineage, bus = older.claimed(), harness.bus
    end = len(bus.log(CONTROL.full_name(RUN)).partitions[0])
    older.keeper.bus = LaggingBus(bus.logs, bus.committed, bus.arrived, bus.epochs, end=end)
    await newer.hold()
    with pytest.raises(Superseded, match="h:b"):
        await older.put(lineage)
    assert given_out(harness) == []


async def test_a_lineage_number_is_claimed_once_per_run(harness: TrainerHarness) -> None:
    """One directory, but two places of checkpoints: both know the run, and neither the other's lineages."""
    identity = MemoryIdentity()
    first, second = Place.make(harness, "a", identity), Place.make(harness, "b", identity)
    second.keeper.holder = first.keeper.holder
    await first.hold()
    await second.hold()
    mine, theirs = first.claimed(), second.claimed()
    assert mine.number == theirs.number
    await first.put(mine)
    # Now, and when it is started again: that its number is as high proves nothing.
    with pytest.raises(IdentityError, match="lineage 1 of another start"):
        await second.put(theirs)
    with pytest.raises(IdentityError, match="--adopt"):
        await second.hold()
    # The winner goes on, and so does whoever is told to.
    await first.hold()
    second.keeper.adopt = True
    assert (await second.hold()).lineages_before == 1
    await second.put(claimed := second.claimed())
    assert claimed.number == 2


async def test_on_a_broker_a_lineage_number_is_claimed_once_per_run(
    harness: TrainerHarness, bootstrap_servers: str
) -> None:
    run = f"lineages-{next(_numbers)}"
    for topic in (CONTROL, STEPS):
        await create_topic(bootstrap_servers, topic.full_name(run), 1)
    bus = KafkaBus(KafkaSettings(bootstrap_servers=bootstrap_servers))
    older, newer = Place.make(harness, "a"), Place.make(harness, "b", adopt=True)
    for place in (older, newer):
        place.keeper.bus, place.keeper.run = bus, run
    await older.hold()
    await older.put(older.claimed())
    late = older.claimed()
    assert (await newer.hold()).lineages_before == 1
    with pytest.raises(Superseded, match="h:b"):
        await older.put(late)
    claimed = newer.claimed()
    assert claimed.number == late.number
    await newer.put(claimed)
    found = (await read_topics(bus, run)).identity
    assert found is not None
    assert (found.lineage, found.claim_id, found.holder) == (2, claimed.claim_id, "h:b")


async def test_the_later_lineage_leads_whichever_trainer_writes_first(
    harness: TrainerHarness,
) -> None:
    identity = MemoryIdentity()
    first, second = (Place.make(harness, "a", identity) for _ in range(2))
    for later_is_first in (False, True):
        await first.hold()
        await second.hold()
        earlier, later = first.claimed(), second.claimed()
        if later_is_first:
            await second.put(later)
            with pytest.raises(Superseded):
                await first.put(earlier)
        else:
            await first.put(earlier)
            await second.put(later)
        assert given_out(harness)[-1] == (later.number, "h:a")


async def test_two_starts_of_one_directory_hold_the_same_identity(harness: TrainerHarness) -> None:
    store = IdentityFile(harness.root)
    keepers = [IdentityKeeper(harness.bus, RUN, store, holder="h:1") for _ in range(3)]
    held = await asyncio.gather(*(keeper.hold(nowhere) for keeper in keepers))
    assert held == [store.load()] * 3
    assert [path.name for path in harness.root.iterdir()] == [store.path.name]


async def test_a_trainer_whose_run_was_adopted_elsewhere_ends_superseded_without_fencing(
    harness: TrainerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "IDLE_S", 0.05)
    older = asyncio.create_task(harness.trainer().run(asyncio.Event()))
    await harness.until_version(1, 0)
    second = elsewhere(harness)
    async with second.running(second.trainer(adopt=True)):
        with pytest.raises(Superseded) as told:
            await within(older, 20)
        assert str(second.root) in str(told.value)
        epochs = dict(harness.bus.epochs)
        for index in range(2):
            await second.publish_group(index, version=PolicyVersion(2, 0))
        await second.until_version(2, 1)
        assert harness.bus.epochs == epochs


async def test_a_fenced_trainer_asks_the_topics_before_it_opens_its_id_again(harness: TrainerHarness) -> None:
    older = asyncio.create_task(harness.trainer().run(asyncio.Event()))
    await harness.until_version(1, 0)
    second = elsewhere(harness)
    async with second.running(second.trainer(adopt=True)):
        await second.until_version(2, 0)
        epoch = harness.bus.epochs[f"{RUN}.grpo.trainer"]
        # Groups for the older one: its own lineage's, which the other skips.
        for index in range(2):
            await harness.publish_group(index)
        with pytest.raises(Superseded):
            await within(older, 20)
        assert harness.bus.epochs[f"{RUN}.grpo.trainer"] == epoch


async def test_a_run_of_before_identities_goes_on_and_gets_one(harness: TrainerHarness) -> None:
    await a_life(harness)
    manifest_path = harness.root / "checkpoints" / "step_2" / "trainer_state" / "manifest.json"
    manifest_path.write_bytes(
        encode_manifest(decode_manifest(manifest_path.read_bytes()).model_copy(update={"run_id": None}))
    )
    IdentityFile(harness.root).path.unlink()
    harness.bus.log(CONTROL.full_name(RUN)).partitions[0].clear()
    await train(harness, 2, 3)
    identity, claimed = [m for m in harness.messages(CONTROL.name) if isinstance(m, RunIdentity)]
    assert (claimed.lineage, claimed.has_same_owner_as(identity)) == (2, True)
    assert IdentityFile(harness.root).load() == identity
    (first,) = [report for report in harness.reports() if report.version == PolicyVersion(2, 2)]
    assert first.run_id == identity.run_id == harness.store().manifests()[0].run_id


MINE = RunIdentity(run_id="mine", holder="h:/mine", since=0.0)
THEIRS = RunIdentity(run_id="theirs", holder="h:/theirs", since=0.0)
FRESH = RunIdentity(run_id="fresh", holder="h:/here", since=1.0)
NOWHERE = CheckpointsState("runs/r/checkpoints")
START = Start(RUN, None, NOWHERE, TopicsState(), FRESH)


def checkpoint(run_id: str | None, lineage: int = 1, run: str = RUN) -> CheckpointsState:
    manifest = CheckpointManifest(
        run=run,
        run_id=run_id,
        algorithm="grpo",
        lineage=lineage,
        step=4,
        policy_version=PolicyVersion(lineage, 4),
        frontier={},
        config_hash="",
        created_at=0.0,
    )
    return CheckpointsState("runs/r/checkpoints", lineage, manifest)


@pytest.mark.parametrize(
    ("start", "run_id", "adoptions"),
    [
        (START, "fresh", 0),
        # Its topics were deleted, or a start died between the directory and the topic.
        (replace(START, here=MINE), "mine", 0),
        (replace(START, held=checkpoint("mine")), "mine", 0),
        (replace(START, here=MINE, held=checkpoint(None), topics=TopicsState(MINE, 1)), "mine", 0),
        # Checkpoints in an object store, and a directory that is new with each container.
        (replace(START, held=checkpoint("mine"), topics=TopicsState(MINE, 1)), "mine", 1),
        # A start that took it over died between the directory and the topic.
        (replace(START, here=MINE.replace(adoptions=1, lineages_before=2), topics=TopicsState(MINE, 2)), "mine", 1),
        # Told to adopt, with nothing to adopt.
        (replace(START, here=MINE, held=checkpoint("mine"), topics=TopicsState(MINE, 1), adopt=True), "mine", 0),
        (replace(START, topics=TopicsState(THEIRS, 3), adopt=True), "theirs", 1),
        (replace(START, here=MINE, topics=TopicsState(THEIRS, 3), adopt=True), "theirs", 1),
        (replace(START, topics=TopicsState(None, 3), adopt=True), "fresh", 1),
    ],
)
def test_a_run_continues_if_identities_agree_or_adoption_is_ordered(start: Start, run_id: str, adoptions: int) -> None:
    found = decide(start)
    assert (found.run_id, found.adoptions) == (run_id, adoptions)
    if start.adopt and adoptions:
        assert (found.lineages_before, found.orphans_through) == (3, 3)


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (replace(START, topics=TopicsState(THEIRS, 0)), "held by h:/theirs"),
        (replace(START, topics=TopicsState(THEIRS.replace(holder="h:/here"), 2)), "the directory was lost or emptied"),
        (replace(START, topics=TopicsState(None, 2)), "found none, while its topics hold a run up to lineage 2"),
        (replace(START, here=MINE, topics=TopicsState(THEIRS, 2)), "which has run mine, found run theirs"),
        (replace(START, here=MINE, topics=TopicsState(MINE.replace(adoptions=1, holder="x:/y"))), "taken over by x:/y"),
        (replace(START, here=MINE, held=checkpoint("mine"), topics=TopicsState(MINE, 2)), "found lineage 1 at most"),
        (replace(START, held=checkpoint(None), topics=TopicsState(THEIRS, 1)), "continues here from step 4"),
    ],
)
def test_differing_identities_give_one_line_with_the_ways_on(start: Start, said: str) -> None:
    with pytest.raises(IdentityError) as told:
        decide(start)
    assert said in str(told.value)
    assert all(way in str(told.value) for way in WAYS), str(told.value)


@pytest.mark.parametrize(
    "start",
    [
        replace(START, held=checkpoint("mine"), topics=TopicsState(THEIRS, 1), adopt=True),
        replace(START, here=MINE, held=checkpoint("theirs"), adopt=True),
        replace(START, held=checkpoint("mine", run="other"), adopt=True),
    ],
)
def test_the_weights_of_one_run_never_go_on_under_the_name_of_another(start: Start) -> None:
    with pytest.raises(IdentityError, match=r"--run\.name|another run directory"):
        decide(start)


def test_the_command_that_deletes_names_the_broker_that_was_named() -> None:
    start = replace(START, topics=TopicsState(THEIRS, 1), servers="kafka:9092")
    with pytest.raises(IdentityError, match="rm --run r --bootstrap-servers kafka:9092`"):
        decide(start)


def test_an_identity_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    IdentityFile(tmp_path).path.write_text(json.dumps({"run_id": 3}))
    with pytest.raises(UserError, match=r"identity\.json.*--adopt"):
        IdentityFile(tmp_path).load()


async def test_a_process_of_a_distant_wire_version_can_neither_hold_nor_join_a_run(
    harness: TrainerHarness,
) -> None:
    there = RunIdentity(run_id="r", since=0.0)

    def held_by(wire: int) -> RunIdentity:
        said = there.replace(wire=wire)
        return decide(Start(RUN, said, NOWHERE, TopicsState(said), said))

    # One of the version before said no number; one of the version after may be followed by this one again.
    assert [held_by(wire).wire for wire in (1, WIRE_VERSION, WIRE_VERSION + 1)] == [
        WIRE_VERSION,
        WIRE_VERSION,
        WIRE_VERSION + 1,
    ]
    with pytest.raises(WireVersionError, match="update this process") as told:
        held_by(WIRE_VERSION + 2)
    assert told.value.exit_code == 2
    for wire, joins in ((WIRE_VERSION + 1, nullcontext()), (WIRE_VERSION + 2, pytest.raises(WireVersionError))):
        await send(harness.bus, RUN, CONTROL, there.replace(wire=wire), IDENTITY_KEY)
        with joins:
            await refuse_other_run(harness.bus, RUN, MemoryIdentity())


async def test_a_trainer_of_a_newer_version_puts_its_number_on_the_topic(harness: TrainerHarness) -> None:
    await a_life(harness)
    before = json.loads((harness.root / "identity.json").read_bytes())
    assert before.pop("wire") == WIRE_VERSION
    older = RunIdentity.model_validate(before)
    await send(harness.bus, RUN, CONTROL, older, IDENTITY_KEY)
    (harness.root / "identity.json").write_text(older.model_dump_json(exclude={"wire"}))
    await train(harness, 2, 2)
    assert IdentityFile(harness.root).load() == older.replace(wire=WIRE_VERSION)
    found = (await read_topics(harness.bus, RUN)).identity
    assert found is not None
    assert found.replace(lineage=0, claim_id="") == older.replace(wire=WIRE_VERSION)


@pytest.mark.parametrize(
    ("start", "run"),
    [
        (START, RUN),
        (replace(START, directory=Path("my runs")), f"'my runs/{RUN}'"),
        (replace(START, servers="kafka:9092", directory=Path("elsewhere")), f"{RUN} --bootstrap-servers kafka:9092"),
    ],
)
def test_the_command_that_deletes_the_topics_names_the_run_where_it_is(start: Start, run: str) -> None:
    assert start.deletion == f"streamrl topics rm --run {run}"
