import asyncio

import pytest

from consumers.batching.samples import Group, Sample
from consumers.intake.frontier import Frontier
from consumers.intake.judging.groups import Closed, Refusal
from consumers.intake.ledger import Ledger
from consumers.intake.rejects import Rejects
from schemas.errors import LifecycleError
from schemas.messages.reports import RecordRef, SkipReason
from schemas.ports.bus import Outgoing, Position, Record
from schemas.ports.memory_bus import MemoryPublisher
from tests.consumers.factories import sample
from tests.consumers.intake.scene import RUN, Scene


async def books(scene: Scene) -> Ledger:
    rejects = Rejects(RUN, "grpo", lambda: 0.0, await scene.bus.publisher("intake"))
    return Ledger(Frontier(), rejects, lambda: 7)


def read(ledger: Ledger, *samples: Sample) -> None:
    for found in samples:
        assert ledger.read(Record("t", 0, found.ref.offset, None, b"x" * 10, (), 0.0))


def closed(samples: list[Sample], refusals: list[Refusal], wanted: int) -> Closed:
    return Closed(Group("d/0/0", 0.0, tuple(samples)), tuple(refusals), wanted)


def members(count: int) -> list[Sample]:
    return [sample("d/0/0", index, of=8, offset=index) for index in range(count)]


def poison(found: Sample) -> Refusal:
    return Refusal(found.ref, SkipReason.POISON, "no reward")


async def test_every_record_meets_one_fate() -> None:
    scene = Scene()
    ledger = await books(scene)
    first, second, third = found = members(3)
    read(ledger, *found)
    ledger.hold(closed([first, second], [poison(third)], 3))
    ledger.mark_trained([first.ref])
    with pytest.raises(LifecycleError, match="is finished"):
        ledger.mark_trained([first.ref])
    fates = ledger.fates()
    assert fates.read == fates.trained + fates.skipped + fates.pending == 3


async def test_a_group_that_was_not_handed_out_cannot_be_finished() -> None:
    ledger = await books(Scene())
    (found,) = members(1)
    read(ledger, found)
    with pytest.raises(LifecycleError, match="handed out"):
        ledger.mark_trained([found.ref])
    with pytest.raises(LifecycleError, match="handed out"):
        await ledger.skip_samples(Group("d/0/0", 0.0, (found,)), SkipReason.STALE, "")


async def test_records_of_a_group_are_finished_together() -> None:
    scene = Scene()
    ledger = await books(scene)
    good, cut, bad, late = found = members(4)
    read(ledger, *found)
    ledger.release(bad.ref)
    ledger.hold(closed([good, cut], [poison(bad)], 4))
    await ledger.skip_late(Refusal(late.ref, SkipReason.GROUP_INCOMPLETE, "late"), "d/0/0")
    ledger.mark_trained([good.ref])
    await ledger.write_due_rows()
    assert scene.skips() == []
    await ledger.skip_samples(Group("d/0/0", 0.0, (cut,)), SkipReason.FILTERED, "cut")
    await ledger.write_due_rows()
    assert scene.reasons() == {
        "d/0/0/1": SkipReason.FILTERED,
        "d/0/0/2": SkipReason.POISON,
        "d/0/0/3": SkipReason.GROUP_INCOMPLETE,
    }
    assert (ledger.pending_bytes, ledger.fates().pending, ledger.frontier.lows()) == (0, 0, {0: 4})


async def test_the_end_of_an_untrained_group_is_told() -> None:
    """Readers count rows against the ordered samples, so a group with missing ones needs a row that ends it."""
    scene = Scene()
    ledger = await books(scene)
    found = members(3)
    read(ledger, *found)
    ledger.hold(closed(found[:2], [poison(found[2])], 8))
    await ledger.skip_samples(Group("d/0/0", 0.0, tuple(found[:2])), SkipReason.STALE, "too old")
    assert list(scene.reasons().values()) == [SkipReason.GROUP_INCOMPLETE, SkipReason.STALE, SkipReason.POISON]
    assert scene.skips()[0].detail == "stale: too old; 5 of 8 samples never came"


async def test_a_group_of_refused_samples_only_is_told_too() -> None:
    scene = Scene()
    ledger = await books(scene)
    found = members(2)
    read(ledger, *found)
    ledger.hold(closed([], [poison(item) for item in found], 3))
    await ledger.skip_samples(Group("d/0/0", 0.0, ()), SkipReason.GROUP_INCOMPLETE, "")
    assert list(scene.reasons().values()) == [SkipReason.GROUP_INCOMPLETE, SkipReason.POISON]


async def test_a_whole_group_keeps_its_reasons() -> None:
    scene = Scene()
    ledger = await books(scene)
    found = members(2)
    read(ledger, *found)
    ledger.hold(closed(found, [], 2))
    await ledger.skip_samples(Group("d/0/0", 0.0, tuple(found)), SkipReason.STALE, "too old")
    assert set(scene.reasons().values()) == {SkipReason.STALE}
    assert {skip.step for skip in scene.skips()} == {7}


async def test_what_is_finished_is_not_read_into_the_books() -> None:
    ledger = await books(Scene())
    ledger.frontier.mark_done([RecordRef("t", 0, 0)])
    assert not ledger.read(Record("t", 0, 0, None, b"", (), 0.0))
    assert ledger.fates().read == 0


class HeldPublisher(MemoryPublisher):
    """Takes records only once it is let go."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene.bus, "held")
        self.let_go = asyncio.Event()

    async def submit(self, record: Outgoing) -> "asyncio.Future[Position]":
        await self.let_go.wait()
        return await super().submit(record)


async def test_due_rows_are_written_when_writing_returns_whoever_writes_them() -> None:
    """A checkpoint taken meanwhile would hold a part of the group."""
    scene = Scene()
    ledger = await books(scene)
    publisher = ledger.rejects.publisher = HeldPublisher(scene)
    good, also, bad = found = members(3)
    read(ledger, *found)
    ledger.hold(closed([good, also], [poison(bad)], 3))
    ledger.mark_trained([good.ref, also.ref])
    reader, trainer = (asyncio.create_task(ledger.write_due_rows()) for _ in range(2))
    await asyncio.sleep(0.01)
    assert not trainer.done()
    publisher.let_go.set()
    await asyncio.gather(reader, trainer)
    assert (scene.reasons(), ledger.frontier.lows()) == ({"d/0/0/2": SkipReason.POISON}, {0: 3})
