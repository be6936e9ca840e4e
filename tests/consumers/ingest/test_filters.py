"""What becomes of single records, seen from the topics."""

from typing import Any

import pytest

from streamrl.bus.port import Outgoing
from streamrl.schemas.codec import encode, headers_of
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import SkipReason
from streamrl.schemas.trajectories import FinishReason, Trajectory
from tests.consumers.factories import trajectory
from tests.consumers.ingest.reader_harness import ReaderHarness, next_group, refs_of
from tests.fakes.messages import heartbeat


async def test_undecodable_bytes_are_dead_lettered_and_nothing_else_is_lost() -> None:
    harness = ReaderHarness()
    good = trajectory("d/0/0", 0)
    bad: list[Outgoing] = [
        Outgoing(harness.topic, b"\x00garbage", "d/0/0", 0, (("schema", b"trajectory"), ("schema-version", b"1"))),
        Outgoing(harness.topic, encode(good)[:-3], "d/0/0", 0, headers_of(good)),
        Outgoing(harness.topic, encode(good), "d/0/0", 0, ()),
        Outgoing(harness.topic, None, None, 0, headers_of(good)),
        Outgoing.of(harness.topic, heartbeat(), key="k" * 400, partition=0),
    ]
    async with harness.running(harness.reader()) as reader:
        await harness.publish(good)
        for record in bad:
            await harness.send(record)
        await harness.publish(trajectory("d/0/0", 1))
        group = await next_group(reader)
    assert [ref.offset for ref in refs_of(group)] == [0, 6]
    assert {(skip.reason, skip.trajectory_id, skip.offset) for skip in harness.skips()} == {
        (SkipReason.POISON, None, offset) for offset in range(1, 6)
    }
    letters = harness.dead_letters()
    assert [letter.value for letter in letters] == [record.value for record in bad]
    assert [letter.headers[: len(record.headers)] for letter, record in zip(letters, bad, strict=True)] == [
        record.headers for record in bad
    ]
    first = dict(letters[0].headers)
    assert (first["dlq-topic"], first["dlq-partition"], first["dlq-offset"]) == (harness.topic.encode(), b"0", b"1")
    assert (first["dlq-error-class"], first["dlq-ts"], first["schema"]) == (
        b"FrameTooLarge",
        b"1000.000",
        b"trajectory",
    )
    assert b"expected a trajectory, got a heartbeat" in dict(letters[4].headers)["dlq-error"]


async def test_bytes_larger_than_any_frame_are_dead_lettered_cut() -> None:
    harness = ReaderHarness()
    async with harness.running(harness.reader()) as reader:
        huge = b"\x00" * (Trajectory.MAX_BYTES + 1)
        await harness.send(Outgoing(harness.topic, huge, None, 0, (("junk", b"x" * 100_000),)))
        await harness.until(lambda: reader.ledger.counts().skipped == 1)
    (letter,) = harness.dead_letters()
    assert letter.value is not None
    assert len(letter.value) == Trajectory.MAX_BYTES
    assert dict(letter.headers)["dlq-cut-from"] == str(len(huge)).encode()
    assert "junk" not in dict(letter.headers)


@pytest.mark.parametrize(
    ("changes", "reason", "detail"),
    [
        ({"rewards": {"exact": None}, "reward_errors": {"exact": "KeyError: 'x'"}}, SkipReason.POISON, "KeyError"),
        ({"rewards": {"exact": None}}, SkipReason.POISON, "no reward applies"),
        ({"tokens": 0, "finish_reason": FinishReason.ABORT, "rewards": {}}, SkipReason.POISON, "aborted after 0"),
    ],
)
async def test_an_unusable_sample_is_skipped_with_its_reason_and_its_group_goes_on(
    changes: dict[str, Any], reason: SkipReason, detail: str
) -> None:
    harness = ReaderHarness(version=PolicyVersion(1, 5))
    fresh: dict[str, Any] = {"versions": (PolicyVersion(1, 5),)}
    async with harness.running(harness.reader()) as reader:
        await harness.publish(*(trajectory("d/0/0", index, of=3, **fresh) for index in (0, 2)))
        await harness.publish(trajectory("d/0/0", 1, of=3, **(fresh | changes)))
        group = await next_group(reader)
        assert [found.trajectory.sample_index for found in group.samples] == [0, 2]
        assert reader.ledger.pending_bytes == sum(len(encode(found.trajectory)) for found in group.samples)
        assert harness.skips() == []
        reader.ledger.mark_trained(refs_of(group))
        await reader.flush()
        (skip,) = harness.skips()
    assert (skip.trajectory_id, skip.reason, skip.step) == ("d/0/0/1", reason, 5)
    assert detail in skip.detail


async def test_rewards_are_weighted_by_name() -> None:
    harness = ReaderHarness()
    async with harness.running(harness.reader(weights={"exact": 2.0})) as reader:
        await harness.publish_group(0, rewards={"exact": 1.0, "format": 0.25, "other": None})
        group = await next_group(reader)
    assert [found.reward for found in group.samples] == [2.25, 2.25]


async def test_repeats_are_skipped_as_duplicates_wherever_they_come() -> None:
    harness = ReaderHarness()
    async with harness.running(harness.reader()) as reader:
        await harness.publish(trajectory("d/0/0", 0))
        await harness.publish(trajectory("d/0/0", 0), partition=1)
        await harness.publish(trajectory("d/0/0", 1))
        group = await next_group(reader)
        reader.ledger.mark_trained(refs_of(group))
        await harness.publish(trajectory("d/0/0", 1, attempt=1))
        await harness.until(lambda: len(harness.skips()) == 2)
        assert reader.ledger.counts().pending == 0
    assert [(skip.reason, skip.partition, skip.offset) for skip in harness.skips()] == [
        (SkipReason.DUPLICATE, 1, 0),
        (SkipReason.DUPLICATE, 0, 2),
    ]


async def test_samples_of_weights_that_a_crash_lost_are_trained() -> None:
    harness = ReaderHarness(version=PolicyVersion(2, 3))
    async with harness.running(harness.reader()) as reader:
        await harness.publish_group(0, versions=(PolicyVersion(1, 4),))
        assert len((await next_group(reader)).samples) == 2


async def test_a_sample_that_cannot_belong_to_its_group_is_poison_and_does_not_count() -> None:
    harness = ReaderHarness()
    async with harness.running(harness.reader()) as reader:
        await harness.publish(trajectory("d/0/0", 0), trajectory("d/0/0", 5, of=2), trajectory("d/0/0", 1))
        group = await next_group(reader)
        assert len(group.samples) == 2
    assert harness.reasons() == {"d/0/0/5": SkipReason.POISON}


async def test_samples_with_every_field_at_its_edge_are_taken() -> None:
    harness = ReaderHarness()
    async with harness.running(harness.reader()) as reader:
        await harness.publish_group(0, tokens=0, prompt=0, finish_reason=FinishReason.LENGTH)
        group = await next_group(reader)
    assert all(found.trajectory.token_ids.size == 0 for found in group.samples)


async def test_the_age_of_an_arms_trajectory_is_that_of_its_order() -> None:
    of_arm: dict[str, Any] = {
        "policy": "rloo",
        "versions": (PolicyVersion(7, 900),),  # of its own count, which says nothing here
        "admitted_version": PolicyVersion(1, 4),
    }
    harness = ReaderHarness(version=PolicyVersion(1, 6))
    async with harness.running(harness.reader()) as reader:
        await harness.publish_group(0, **of_arm)
        assert (await next_group(reader)).group_id == "d/0/0"
        await harness.publish_group(1, **of_arm | {"admitted_version": PolicyVersion(1, 3)})
        await harness.publish_group(2, versions=(PolicyVersion(1, 6),))
        assert (await next_group(reader)).group_id == "d/2/0"
    assert {(row.group_id, row.reason) for row in harness.skips()} == {("d/1/0", SkipReason.STALE)}
