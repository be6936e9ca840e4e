from dataclasses import replace

import pytest

from streamrl.bus.port import Record
from streamrl.consumers.batching.micro_batches import Group, Sample
from streamrl.consumers.ingest.frontier import Frontier
from streamrl.consumers.ingest.groups import ClosedGroup, Rejection
from streamrl.consumers.ingest.ledger import KnownRecord, Ledger
from streamrl.consumers.ingest.rejections import RejectionWriter, SkipTally
from streamrl.schemas.errors import LifecycleError
from streamrl.schemas.reports import RecordRef, SkipReason
from tests.consumers.factories import sample
from tests.consumers.ingest.reader_harness import RUN, ReaderHarness


async def a_ledger(harness: ReaderHarness) -> Ledger:
    rejections = RejectionWriter(RUN, "grpo", lambda: 0.0, SkipTally(1), await harness.bus.publisher("reader"))
    return Ledger(Frontier(), rejections, lambda: 7)


def read(ledger: Ledger, *samples: Sample) -> None:
    for found in samples:
        assert ledger.record_read(Record("t", 0, found.ref.offset, None, b"x" * 10, (), 0.0))


def closed(samples: list[Sample], rejections: list[Rejection], wanted: int) -> ClosedGroup:
    return ClosedGroup(Group("d/0/0", 0.0, tuple(samples)), tuple(rejections), wanted)


def members(count: int) -> list[Sample]:
    return [sample("d/0/0", index, of=8, offset=index) for index in range(count)]


def poison(found: Sample) -> Rejection:
    return Rejection(found.ref, SkipReason.POISON, "no reward")


async def test_every_record_has_one_outcome() -> None:
    harness = ReaderHarness()
    ledger = await a_ledger(harness)
    first, second, third = found = members(3)
    read(ledger, *found)
    ledger.hold(closed([first, second], [poison(third)], 3))
    ledger.mark_trained([first.ref])
    with pytest.raises(LifecycleError, match="is already finished"):
        ledger.mark_trained([first.ref])
    counts = ledger.counts()
    assert counts.read == counts.trained + counts.skipped + counts.pending == 3


async def test_a_group_that_was_not_handed_out_cannot_be_finished() -> None:
    ledger = await a_ledger(ReaderHarness())
    (found,) = members(1)
    read(ledger, found)
    with pytest.raises(LifecycleError, match="handed out"):
        ledger.mark_trained([found.ref])
    with pytest.raises(LifecycleError, match="handed out"):
        ledger.mark_skipped(Group("d/0/0", 0.0, (found,)), SkipReason.STALE, "")


async def test_records_of_a_group_are_finished_together() -> None:
    harness = ReaderHarness()
    ledger = await a_ledger(harness)
    good, cut, bad, late = found = members(4)
    read(ledger, *found)
    ledger.release(bad.ref)
    ledger.hold(closed([good, cut], [poison(bad)], 4))
    ledger.skip_late(Rejection(late.ref, SkipReason.GROUP_INCOMPLETE, "late"), "d/0/0", 2)
    ledger.mark_trained([good.ref])
    assert ledger.rejections.tally.count == 0
    ledger.mark_skipped(Group("d/0/0", 0.0, (cut,)), SkipReason.FILTERED, "cut")
    await ledger.rejections.flush()
    assert harness.reasons() == {
        "d/0/0/1": SkipReason.FILTERED,
        "d/0/0/2": SkipReason.POISON,
        "d/0/0/3": SkipReason.GROUP_INCOMPLETE,
    }
    assert (ledger.pending_bytes, ledger.counts().pending, ledger.frontier.lows()) == (0, 0, {0: 4})


async def test_the_end_of_an_untrained_group_is_reported() -> None:
    """Readers count rows against the ordered samples, so a group with missing ones needs a row that ends it."""
    harness = ReaderHarness()
    ledger = await a_ledger(harness)
    found = members(3)
    read(ledger, *found)
    ledger.hold(closed(found[:2], [poison(found[2])], 8))
    ledger.mark_skipped(Group("d/0/0", 0.0, tuple(found[:2])), SkipReason.STALE, "too old")
    await ledger.rejections.flush()
    assert list(harness.reasons().values()) == [SkipReason.GROUP_INCOMPLETE, SkipReason.STALE, SkipReason.POISON]
    assert harness.skips()[0].detail == "stale: too old; 5 of 8 samples never arrived"


async def test_a_group_of_refused_samples_only_is_reported_too() -> None:
    harness = ReaderHarness()
    ledger = await a_ledger(harness)
    found = members(2)
    read(ledger, *found)
    ledger.hold(closed([], [poison(item) for item in found], 3))
    ledger.mark_skipped(Group("d/0/0", 0.0, ()), SkipReason.GROUP_INCOMPLETE, "")
    await ledger.rejections.flush()
    assert list(harness.reasons().values()) == [SkipReason.GROUP_INCOMPLETE, SkipReason.POISON]


async def test_a_whole_group_keeps_its_reasons() -> None:
    harness = ReaderHarness()
    ledger = await a_ledger(harness)
    found = members(2)
    read(ledger, *found)
    ledger.hold(closed(found, [], 2))
    ledger.mark_skipped(Group("d/0/0", 0.0, tuple(found)), SkipReason.STALE, "too old")
    await ledger.rejections.flush()
    assert set(harness.reasons().values()) == {SkipReason.STALE}
    assert {skip.step for skip in harness.skips()} == {7}


async def test_a_finished_record_is_not_entered_again() -> None:
    ledger = await a_ledger(ReaderHarness())
    ledger.frontier.mark_done([RecordRef("t", 0, 0)])
    assert not ledger.record_read(Record("t", 0, 0, None, b"", (), 0.0))
    assert ledger.counts().read == 0


async def test_a_row_and_the_end_of_its_record_are_one_act() -> None:
    """A checkpoint between them would count the row and read the record again."""
    harness = ReaderHarness()
    ledger = await a_ledger(harness)
    good, also, bad = found = members(3)
    read(ledger, *found)
    ledger.hold(closed([good, also], [poison(bad)], 3))
    ledger.mark_trained([good.ref, also.ref])
    assert (ledger.rejections.tally.count, ledger.frontier.lows()) == (1, {0: 3})
    assert harness.skips() == []
    await ledger.rejections.flush()
    assert harness.reasons() == {"d/0/0/2": SkipReason.POISON}


async def test_the_highest_finished_record_with_a_name_is_the_anchor() -> None:
    ledger = await a_ledger(ReaderHarness())
    found = members(3)
    read(ledger, *found)
    for item in (found[1], found[0]):
        ledger.skip(poison(item), "d/0/0")
    ledger.skip(Rejection(found[2].ref._replace(trajectory_id=""), SkipReason.POISON, "junk"), None)
    assert ledger.known_records == {0: KnownRecord(offset=1, trajectory_id="d/0/0/1")}


async def test_the_prompt_cursor_follows_the_groups_that_ended() -> None:
    ledger = await a_ledger(ReaderHarness())
    found = members(2)
    read(ledger, *found)
    ledger.hold(replace(closed(found, [], 2), position=41))
    ledger.mark_trained([found[0].ref])
    assert ledger.prompt_cursor == 0
    ledger.mark_trained([found[1].ref])
    assert ledger.prompt_cursor == 42


async def test_a_lost_stretch_gets_a_row_for_each_part_that_was_not_finished() -> None:
    harness = ReaderHarness()
    ledger = await a_ledger(harness)
    ledger.frontier = Frontier.from_json({"0": {"low": 2, "done": [4, 5, 8]}})
    ledger.record_loss(0, 2, 10)
    await ledger.rejections.flush()
    assert [(skip.offset, skip.end_offset, skip.reason) for skip in harness.skips()] == [
        (2, 4, SkipReason.RETENTION_EXPIRED),
        (6, 8, SkipReason.RETENTION_EXPIRED),
        (9, 10, SkipReason.RETENTION_EXPIRED),
    ]
    assert (ledger.frontier.lows(), ledger.frontier.positions()) == ({0: 10}, {0: 10})
    assert ledger.rejections.tally.reasons == {"retention_expired": 5}
