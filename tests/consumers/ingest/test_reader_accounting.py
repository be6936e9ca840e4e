"""Random inputs through two runs of a reader: the accounts agree with the topics, record by record."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.bus.port import Outgoing
from streamrl.consumers.batching.micro_batches import Group
from streamrl.consumers.ingest.limits import IntakeLimits
from streamrl.consumers.ingest.reader import ReaderSnapshot, TrajectoryReader
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import SkipReason
from streamrl.schemas.trajectories import FinishReason
from tests.consumers.factories import trajectory
from tests.consumers.ingest.reader_harness import LOOP, ReaderHarness, checkpoint, refs_of
from tests.fakes.subscription import PacedBus

NOW = PolicyVersion(2, 5)
KINDS: dict[str, dict[str, Any]] = {
    "good": {},
    "stale": {"versions": (PolicyVersion(2, 2), NOW)},
    "unrewarded": {"rewards": {"exact": None}},
    "aborted": {"tokens": 0, "finish_reason": FinishReason.ABORT, "rewards": {}},
    "foreign": {"trajectory_id": "elsewhere/7"},
}
TRAINABLE = {"good"}
LENIENT = IntakeLimits(max_consecutive_faults=1000, max_undecodable_share=1.0)

Event = tuple[str, int, int, int]
"""Kind, group, sample index, partition."""
events = st.tuples(
    st.sampled_from(["good", "good", "good", "good", *KINDS, "junk"]),
    st.integers(0, 4),
    st.integers(0, 2),
    st.integers(0, LOOP.trajectory_partitions - 1),
)
outcomes = st.sampled_from(["train", "train", "skip", "cut", "hold"])


@dataclass
class Trainer:
    """Deals with groups as it is told, then trains everything; remembers what is in the weights."""

    trained: list[tuple[int, int]] = field(default_factory=list)

    async def deal_with(self, reader: TrajectoryReader, group: Group, outcome: str) -> None:
        if outcome == "skip":
            reader.ledger.mark_skipped(group, SkipReason.ZERO_ADVANTAGE, "equal")
        elif outcome == "cut":
            self._train(reader, Group(group.group_id, group.created_at, group.samples[1:]))
            cut = Group(group.group_id, group.created_at, group.samples[:1])
            reader.ledger.mark_skipped(cut, SkipReason.FILTERED, "cut")
        elif outcome == "train":
            self._train(reader, group)

    def _train(self, reader: TrajectoryReader, group: Group) -> None:
        reader.ledger.mark_trained(refs_of(group))
        self.trained += [(ref.partition, ref.offset) for ref in refs_of(group)]


async def publish(harness: ReaderHarness, plan: list[Event]) -> dict[tuple[int, int], str]:
    """What was written, by partition and offset."""
    written: dict[tuple[int, int], str] = {}
    for kind, group, index, partition in plan:
        place = partition, len(harness.bus.log(harness.topic).partitions[partition])
        written[place] = kind
        if kind == "junk":
            await harness.send(Outgoing(harness.topic, b"junk", f"d/{group}/0", partition))
        else:
            fields: dict[str, Any] = {"versions": (NOW,), "of": 3, "created_at": float(group)} | KINDS[kind]
            await harness.publish(trajectory(f"d/{group}/0", index, **fields), partition=partition)
    return written


async def live(
    harness: ReaderHarness, start: ReaderSnapshot | None, count: int, chosen: list[str], trainer: Trainer
) -> ReaderSnapshot:
    """One process of a reader, until it is killed: reads ``count`` records, closes what is incomplete, trains."""
    reader = harness.reader(start, limits=LENIENT, max_unrewarded_share=1.0)
    reading = asyncio.create_task(reader.run(asyncio.Event()))
    await harness.until_read(reader, count)
    await asyncio.sleep(0.01)
    # So far on that whoever would complete a group is gone; and back, so that what is complete is still fresh.
    harness.version = PolicyVersion(NOW.lineage, NOW.number + 100)
    await asyncio.sleep(0.02)
    harness.version = NOW
    try:
        while True:
            group = await asyncio.wait_for(reader.next_group(), 0.03)
            await trainer.deal_with(reader, group, chosen.pop(0) if chosen else "train")
    except TimeoutError:
        await reader.flush()
    found = reader.ledger.counts()
    assert found.read == count == found.trained + found.skipped + found.pending
    kept = checkpoint(reader)
    reading.cancel()
    await asyncio.wait({reading})
    return kept


async def check(plan: list[Event], chosen: list[str]) -> None:
    harness = ReaderHarness(PacedBus(wait_s=0.002), version=NOW)
    trainer = Trainer()
    written = await publish(harness, plan)
    kept = await live(harness, None, len(written), chosen, trainer)
    finished = {place for place in written if kept.frontier.is_done(*place)}
    skipped = {(skip.partition, skip.offset) for skip in harness.skips()}
    assert finished == set(trainer.trained) | skipped
    await live(harness, kept, len(written) - len(finished), [], trainer)
    accounts = Counter(trainer.trained) + Counter((skip.partition, skip.offset) for skip in harness.skips())
    assert accounts == Counter(list(written)), "every record has one outcome, across both runs"
    assert all(written[place] in TRAINABLE for place in trainer.trained)
    junk = [place for place, kind in written.items() if kind == "junk"]
    assert len(harness.dead_letters()) == len(junk)
    reasons = {(skip.partition, skip.offset): skip.reason for skip in harness.skips()}
    assert all(reasons[place] is SkipReason.POISON for place in junk)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(events, max_size=30), st.lists(outcomes, max_size=5))
def test_produced_is_trained_and_skipped_and_pending(plan: list[Event], chosen: list[str]) -> None:
    asyncio.run(check(plan, chosen))


def test_every_kind_of_record_has_the_outcome_it_deserves() -> None:
    plan: list[Event] = [
        *(("good", 0, index, 0) for index in range(3)),
        ("good", 0, 1, 1),
        *(("good", 1, index, 1) for index in (0, 1)),
        *(("good", 2, index, 2) for index in (0, 2)),
        ("stale", 2, 1, 2),
        *((kind, 3, index, 3) for index, kind in enumerate(("unrewarded", "aborted", "aborted"))),
        ("foreign", 4, 0, 0),
        ("junk", 4, 1, 0),
        ("good", 4, 2, 0),
    ]

    async def scenario() -> dict[str, int]:
        harness, trainer = ReaderHarness(PacedBus(wait_s=0.002), version=NOW), Trainer()
        written = await publish(harness, plan)
        await live(harness, None, len(written), ["train", "skip"], trainer)
        return Counter(skip.reason.value for skip in harness.skips()) | {"trained": len(trainer.trained)}

    # Group 2 ages out with its stale sample; of group 4 one good sample came.
    assert asyncio.run(scenario()) == {
        "trained": 3,
        "duplicate": 1,
        "group_incomplete": 1,
        "poison": 5,
        "stale": 3,
        "zero_advantage": 2,
    }
