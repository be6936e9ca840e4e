"""Dead letters for the page: a list of the newest, and sending one once more."""

from typing import Any

from deploy.dashboard.room import Room
from deploy.inspection.letters.letters import Letter, letter_of
from deploy.inspection.letters.retrying import plan_retries, send_retries
from deploy.inspection.letters.view import as_json
from schemas.errors import UserError
from schemas.ports.history import Extent
from schemas.wire.topics import DEAD_LETTERS

SHOWN = 100
HEAD = 96


async def newest_letters(room: Room) -> dict[str, Any]:
    """How many there are, and the newest, newest first."""
    topic, history = DEAD_LETTERS.full_name(room.state.run), room.history
    extents = {tp.partition: held for tp, held in (await history.extents(topic)).items()}
    total = sum(held.end - held.first for held in extents.values())
    newest = {partition: Extent(max(held.first, held.end - SHOWN), held.end) for partition, held in extents.items()}
    letters = [letter_of(record) async for record in history.records(topic, newest)]
    return {"total": total, "letters": [_shown(letter) for letter in reversed(letters)]}


async def retry_letter(room: Room, offset: int) -> dict[str, str]:
    """Send a letter once more, unless it was sent before or still does not decode.

    Raises:
        UserError: there is no such letter.
        BusError: the broker refuses, or does not answer.
    """
    outcomes, missing = await plan_retries(room.history, room.state.run, [offset])
    if missing:
        raise UserError(f"expected a dead letter at offset {offset}, found none")
    (outcome,) = await send_retries(room.bus, outcomes)
    return {"action": outcome.action.value, "detail": outcome.detail}


def _shown(letter: Letter) -> dict[str, Any]:
    return {**as_json(letter), "head": (letter.record.value or b"")[:HEAD].hex(" ")}
