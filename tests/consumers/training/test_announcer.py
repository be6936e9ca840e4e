import pytest

from streamrl.bus.port import Outgoing, TopicPartition
from streamrl.consumers.training.announcer import ATTEMPTS, StepAnnouncer, open_announcer
from streamrl.schemas.errors import BusError, BusUnavailable, DeliveryUnknown, Superseded
from tests.fakes.transactions import AnsweringBus

RECORD = Outgoing("r.steps", b"report", "grpo")
PLACE = TopicPartition("r.trajectories", 0)


def bus(*answers: BusError | Superseded | None, arrives: bool = False) -> AnsweringBus:
    found = AnsweringBus(role=".trainer", answers=list(answers), arrives=arrives)
    found.create_topic("r.steps", 1)
    return found


async def announcer(moody: AnsweringBus, *, superseded: bool = False) -> tuple[StepAnnouncer, list[float]]:
    """With the pauses it made."""
    found = await open_announcer(moody, "r", "grpo")
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    async def check() -> None:
        if superseded:
            raise Superseded("a newer lineage exists")

    found.pause = pause
    found.guard_with(check)
    return found, pauses


def values(moody: AnsweringBus) -> list[bytes | None]:
    return [record.value for record in moody.log("r.steps").partitions[0]]


async def test_records_and_offsets_go_in_one_transaction() -> None:
    moody = bus()
    found, _ = await announcer(moody)
    await found.announce([RECORD], {PLACE: 7})
    assert (values(moody), moody.committed) == ([b"report"], {("r.grpo", PLACE): 7})
    assert moody.epochs == {"r.grpo.trainer": 1}


async def test_an_unknown_outcome_is_tried_again_in_a_new_transaction_with_growing_pauses() -> None:
    moody = bus(DeliveryUnknown("late"), BusUnavailable("gone"), DeliveryUnknown("late"))
    found, pauses = await announcer(moody)
    await found.announce([RECORD], {})
    assert (values(moody), moody.opened) == ([b"report"], 4)
    assert pauses == [0.2, 0.4, 0.8]


async def test_a_broker_that_never_answers_is_not_asked_for_ever() -> None:
    moody = bus(*(DeliveryUnknown("late") for _ in range(99)))
    found, _ = await announcer(moody)
    with pytest.raises(DeliveryUnknown):
        await found.announce([RECORD], {})
    assert moody.opened == ATTEMPTS


async def test_a_newer_trainer_is_never_fenced_blindly() -> None:
    moody = bus(DeliveryUnknown("late"))
    found, _ = await announcer(moody, superseded=True)
    with pytest.raises(Superseded, match="newer lineage"):
        await found.announce([RECORD], {})
    assert moody.opened == 1


async def test_a_fenced_trainer_with_an_older_lineage_ends() -> None:
    moody = bus()
    found, _ = await announcer(moody, superseded=True)
    await moody.transactional("r.grpo.trainer")
    with pytest.raises(Superseded) as told:
        await found.announce([RECORD], {})
    assert (told.value.exit_code, values(moody)) == (3, [])


async def test_the_newest_lineage_fenced_by_one_that_was_just_going_opens_again_once() -> None:
    moody = bus()
    found, _ = await announcer(moody)
    await moody.transactional("r.grpo.trainer")
    await found.announce([RECORD], {})
    await moody.transactional("r.grpo.trainer")
    with pytest.raises(Superseded):
        await found.announce([RECORD], {})
    assert values(moody) == [b"report"]


async def test_a_refusal_is_not_tried_again() -> None:
    moody = bus(BusError("too large"))
    found, pauses = await announcer(moody)
    with pytest.raises(BusError, match="too large"):
        await found.announce([RECORD], {})
    assert pauses == []
