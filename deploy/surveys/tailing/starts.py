"""Where reading begins: ``beginning``, ``latest``, ``-100``, an offset, or a time. The words are kcat's."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from deploy.inspection.letters.commands import moment
from schemas.errors import UserError
from schemas.ports.bus import TopicPartition
from schemas.ports.history import Extent

Extents = Mapping[TopicPartition, Extent]
OffsetsSince = Callable[[Extents, float], Awaitable[Mapping[TopicPartition, int]]]
"""The first offsets at or after a moment, by partition."""
MOST_RECENT = 100_000


@dataclass(frozen=True)
class Last:
    """The newest records of the topic, so many in all."""

    count: int


@dataclass(frozen=True)
class At:
    """An offset of every partition."""

    offset: int


@dataclass(frozen=True)
class Since:
    """A moment, in seconds since the epoch."""

    moment: float


Start = Last | At | Since


def parse_start(text: str, now: float) -> Start:
    """Read a start.

    Raises:
        UserError: it is none.
    """
    word = text.strip().lower()
    if word in ("beginning", "earliest"):
        return At(0)
    if word in ("latest", "end", "-0"):
        return Last(0)
    if word.startswith("-") and word[1:].isdigit():
        if (count := int(word)) >= -MOST_RECENT:
            return Last(-count)
        raise UserError(
            f"expected at most the last {MOST_RECENT} records, got {text}; name an offset or a time instead"
        )
    if word.isdigit() and len(word) < 19:
        return At(int(word))
    try:
        return Since(moment(text, now))
    except UserError as error:
        raise UserError(
            f"expected a start such as beginning, latest, -100, an offset, 10m or 2026-01-31T12:00, got {text!r}"
        ) from error


async def first_offsets(start: At | Since, extents: Extents, offsets_since: OffsetsSince) -> dict[TopicPartition, int]:
    """Where to begin in each partition, within what is held."""
    if isinstance(start, At):
        wanted: Mapping[TopicPartition, int] = dict.fromkeys(extents, start.offset)
    else:
        wanted = await offsets_since(extents, start.moment)
    return {tp: min(max(wanted.get(tp, held.end), held.first), held.end) for tp, held in extents.items()}
