"""Sends dead letters once more to where they came from.

Invariants, each with a test of its name:
- a_letter_is_retried_once: what was sent is told by a header on the topic itself, so a second call sends nothing, also
  when the same record became a dead letter twice;
- what_still_does_not_decode_stays: unless it is forced, and never what was cut.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from deploy.inspection.letters.letters import RETRY_OF, Letter, Origin, read_letters
from schemas.ports.bus import Bus
from schemas.ports.history import History
from schemas.wire.topics import TRAJECTORIES


class Action(StrEnum):
    """What becomes of a letter."""

    SENT = "sent"
    WOULD_SEND = "would send"
    ALREADY = "already retried"
    REFUSED = "refused"


@dataclass(frozen=True)
class Outcome:
    """One letter, and what was done about it."""

    letter: Letter
    action: Action
    detail: str = ""


async def plan_retries(
    history: History, run: str, offsets: Collection[int] | None, *, force: bool = False
) -> tuple[list[Outcome], list[int]]:
    """What to do about each chosen letter, oldest first, and the offsets that name none.

    Args:
        history: of the run.
        run: its name.
        offsets: of the letters on their own topic; None: all.
        force: send also what does not decode.
    """
    topic = TRAJECTORIES.full_name(run)
    letters = [letter async for letter in read_letters(history, run) if offsets is None or letter.offset in offsets]
    retried = await _already_retried(history, topic) if letters else set()
    outcomes = []
    for letter in letters:
        outcome = _judge(letter, topic, retried, force=force)
        outcomes.append(outcome)
        if outcome.action is Action.WOULD_SEND and letter.origin is not None:
            retried.add(letter.origin)
    return outcomes, sorted(set(offsets or ()) - {letter.offset for letter in letters})


async def send_retries(bus: Bus, outcomes: Collection[Outcome]) -> list[Outcome]:
    """Carry a plan out; returns when the broker has every record.

    Raises:
        BusError: the broker refused one, or did not answer: call again, what arrived is not sent twice.
    """
    done = []
    publisher = await bus.publisher("dlq-retry")
    try:
        for outcome in outcomes:
            if outcome.action is not Action.WOULD_SEND:
                done.append(outcome)
                continue
            position = await publisher.publish(outcome.letter.retry())
            done.append(Outcome(outcome.letter, Action.SENT, f"as {Origin(*position)}"))
    finally:
        await publisher.close()
    return done


def _judge(letter: Letter, topic: str, retried: Collection[Origin], *, force: bool) -> Outcome:
    origin = letter.origin
    if origin is None or origin.topic != topic:
        return Outcome(
            letter, Action.REFUSED, f"expected a record of {topic}, it came from {origin or 'nowhere known'}"
        )
    if origin in retried:
        return Outcome(letter, Action.ALREADY)
    if letter.cut_from is not None:
        return Outcome(letter, Action.REFUSED, f"only {letter.size} of its {letter.cut_from} bytes were kept")
    problem = letter.problem()
    if problem is not None and not force:
        return Outcome(letter, Action.REFUSED, f"it still does not decode ({problem}); --force sends it all the same")
    return Outcome(letter, Action.WOULD_SEND)


async def _already_retried(history: History, topic: str) -> set[Origin]:
    found = set()
    async for record in history.records(topic):
        for name, content in record.headers:
            if name == RETRY_OF and content is not None:
                partition, _, offset = content.decode(errors="replace").partition("@")
                if partition.isdecimal() and offset.isdecimal():
                    found.add(Origin(topic, int(partition), int(offset)))
    return found
