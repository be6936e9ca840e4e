import asyncio
from typing import Any

import pytest

from streamrl.bus.history import BusHistory
from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing, Record
from streamrl.inspection import dead_letters
from streamrl.inspection.dead_letters import (
    Origin,
    RetryAction,
    RetryOutcome,
    as_json,
    dead_letter_of,
    lines_of,
    moment,
    read_dead_letter,
    read_dead_letters,
    retry,
    retry_lines,
)
from streamrl.observability.record_index.entries import RETRY_OF
from streamrl.observability.record_index.following import IndexFollower
from streamrl.observability.record_index.store import RecordIndex
from streamrl.schemas.codec import Headers, encode, headers_of
from streamrl.schemas.errors import UserError
from streamrl.schemas.topics import DEAD_LETTERS, TRAJECTORIES
from tests.consumers.factories import trajectory

RUN = "r"
TOPIC = TRAJECTORIES.full_name(RUN)
GOOD = trajectory()


def letter_headers(partition: int, offset: int, topic: str = TOPIC, error: str = "MalformedFrame") -> Headers:
    return (
        ("dlq-error-class", error.encode()),
        ("dlq-error", b"expected better"),
        ("dlq-topic", topic.encode()),
        ("dlq-partition", str(partition).encode()),
        ("dlq-offset", str(offset).encode()),
        ("dlq-ts", b"1.000"),
    )


async def _bus(*letters: Outgoing) -> MemoryBus:
    bus = MemoryBus()
    bus.create_topic(TOPIC, 3)
    bus.create_topic(DEAD_LETTERS.full_name(RUN), 1)
    publisher = await bus.publisher("p")
    for letter in letters:
        await publisher.publish(letter)
    return bus


def dead(value: bytes | None, *headers: Headers) -> Outgoing:
    return Outgoing(DEAD_LETTERS.full_name(RUN), value, "key", 0, tuple(each for part in headers for each in part))


def whole(partition: int = 1, offset: int = 0) -> Outgoing:
    """Bytes that decode today, though they did not when they were refused."""
    return dead(encode(GOOD), headers_of(GOOD), letter_headers(partition, offset))


def follower(bus: MemoryBus) -> IndexFollower:
    return IndexFollower(BusHistory(bus), RUN, RecordIndex(None))


async def _retry(bus: MemoryBus, offsets: set[int] | None = None, *, force: bool = False) -> list[RetryOutcome]:
    outcomes, missing = await retry(bus, follower(bus), offsets, force=force)
    assert not missing
    return outcomes


async def _sent(bus: MemoryBus) -> list[Record]:
    return [record async for record in BusHistory(bus).records(TOPIC)]


async def test_a_retried_record_is_the_refused_one_with_a_header_that_says_so() -> None:
    bus = await _bus(whole(partition=2, offset=7))
    (outcome,) = await _retry(bus)
    (record,) = await _sent(bus)
    assert outcome.action is RetryAction.SENT
    assert outcome.detail == f"to {TOPIC}[2]"
    assert (record.partition, record.key, record.value) == (2, "key", encode(GOOD))
    assert record.headers == (*headers_of(GOOD), (RETRY_OF, b"2@7"))
    assert record.message() == GOOD


async def test_a_dead_letter_is_retried_once() -> None:
    bus = await _bus(whole(1, 0), whole(1, 4))
    assert [outcome.action for outcome in await _retry(bus, {0})] == [RetryAction.SENT]
    assert [outcome.action for outcome in await _retry(bus)] == [RetryAction.ALREADY, RetryAction.SENT]
    assert [outcome.action for outcome in await _retry(bus)] == [RetryAction.ALREADY, RetryAction.ALREADY]
    assert len(await _sent(bus)) == 2


async def test_a_record_that_became_a_dead_letter_twice_is_sent_once() -> None:
    bus = await _bus(whole(1, 3), whole(1, 3))
    assert [outcome.action for outcome in await _retry(bus)] == [RetryAction.SENT, RetryAction.ALREADY]


async def test_a_retry_that_failed_again_can_be_retried_itself() -> None:
    again = (RETRY_OF, b"1@0")
    bus = await _bus(whole(1, 0), dead(encode(GOOD), (*headers_of(GOOD), again), letter_headers(1, 5)))
    await _retry(bus)
    assert [record.headers[-1] for record in await _sent(bus)] == [(RETRY_OF, b"1@0"), (RETRY_OF, b"1@5")]
    assert [outcome.action for outcome in await _retry(bus)] == [RetryAction.ALREADY, RetryAction.ALREADY]


async def test_undecodable_records_are_refused_unless_it_is_forced() -> None:
    bus = await _bus(dead(b"\xffjunk", headers_of(GOOD), letter_headers(0, 1)))
    (refused,) = await _retry(bus)
    assert refused.action is RetryAction.REFUSED
    assert "MalformedFrame" in refused.detail or "FrameTooLarge" in refused.detail
    assert await _sent(bus) == []
    (forced,) = await _retry(bus, force=True)
    assert forced.action is RetryAction.SENT
    assert [record.value for record in await _sent(bus)] == [b"\xffjunk"]


@pytest.mark.parametrize(
    "dead_letter",
    [
        dead(b"x", letter_headers(0, 1), (("dlq-cut-from", b"99999999"),)),
        dead(b"x", letter_headers(0, 1, topic="other.trajectories")),
        dead(b"x", (("dlq-topic", TOPIC.encode()), ("dlq-partition", b"-1"), ("dlq-offset", b"1"))),
        dead(None),
    ],
    ids=["cut", "of another topic", "with a partition that is none", "without headers"],
)
async def test_records_that_cannot_be_sent_are_refused_even_with_force(dead_letter: Outgoing) -> None:
    bus = await _bus(dead_letter)
    (outcome,) = await _retry(bus, force=True)
    assert outcome.action is RetryAction.REFUSED
    assert await _sent(bus) == []


async def test_offsets_without_a_dead_letter_are_reported() -> None:
    bus = await _bus(whole())
    plan, missing = await retry(bus, follower(bus), {0, 3, 9})
    assert [outcome.action for outcome in plan] == [RetryAction.WOULD_SEND]
    assert missing == [3, 9]
    assert await _sent(bus) == []


async def test_one_of_two_concurrent_retries_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comes between the other's look and its sending, as often as can be."""
    bus = await _bus(whole(1, 0))
    plan = dead_letters.plan_retries
    looked = asyncio.Barrier(2)
    rounds = 0

    async def plan_together(*args: Any, **options: Any) -> Any:
        nonlocal rounds
        found = await plan(*args, **options)
        rounds += 1
        if rounds <= 2:
            await looked.wait()
        return found

    monkeypatch.setattr(dead_letters, "plan_retries", plan_together)
    monkeypatch.setattr(dead_letters, "PAUSE_S", 0.01)
    both = await asyncio.gather(retry(bus, follower(bus), {0}), retry(bus, follower(bus), {0}))
    assert sorted(outcomes[0].action for outcomes, _ in both) == [RetryAction.ALREADY, RetryAction.SENT]
    assert len(await _sent(bus)) == 1


async def test_a_retry_that_is_always_fenced_gives_up_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = await _bus(whole(1, 0))
    plan = dead_letters.plan_retries

    async def overtaken(*args: Any, **options: Any) -> Any:
        found = await plan(*args, **options)
        await bus.transactional(f"{RUN}.dlq-retry")
        return found

    monkeypatch.setattr(dead_letters, "plan_retries", overtaken)
    monkeypatch.setattr(dead_letters, "PAUSE_S", 0.001)
    with pytest.raises(UserError, match="found one; try again later"):
        await retry(bus, follower(bus), {0})
    assert await _sent(bus) == []


async def test_dead_letters_are_read_and_shown() -> None:
    bus = await _bus(whole(1, 4), dead(bytes(range(256)) * 2, (("odd", b"\xff"),), letter_headers(0, 2)))
    found_letters = [dead_letter async for dead_letter in read_dead_letters(BusHistory(bus), RUN)]
    assert [dead_letter.origin for dead_letter in found_letters] == [Origin(TOPIC, 1, 4), Origin(TOPIC, 0, 2)]
    good, bad = ("\n".join(lines_of(dead_letter)) for dead_letter in found_letters)
    assert "decoding it today: a trajectory" in good
    assert GOOD.completion_text in good
    assert "UnknownSchema" in bad
    assert "20 21 22" in bad
    assert "256 bytes more" in bad
    assert as_json(found_letters[0])["origin_offset"] == 4
    found = await read_dead_letter(BusHistory(bus), RUN, 1)
    assert found is not None
    assert found.size == 512
    assert await read_dead_letter(BusHistory(bus), RUN, 2) is None
    assert "refused: why" in next(iter(retry_lines([RetryOutcome(found_letters[0], RetryAction.REFUSED, "why")])))


def test_a_dead_letter_with_any_headers_can_be_listed() -> None:
    odd: Headers = (("dlq-offset", b"9" * 40), ("dlq-topic", b"\xff"), ("dlq-partition", b"\xb2"))
    dead_letter = dead_letter_of(Record("t", 0, 0, None, None, odd, 0.0))
    assert dead_letter.origin is None
    assert dead_letter.error_class == "(none)"
    assert list(lines_of(dead_letter))


def test_a_time_is_an_age_or_a_date() -> None:
    assert moment("90s", 1000.0) == 910.0
    assert moment("1.5h", 10_000.0) == 4600.0
    assert moment("1970-01-02T00:00+00:00", 0.0) == 86_400.0
    with pytest.raises(UserError, match="such as"):
        moment("yesterday", 0.0)
