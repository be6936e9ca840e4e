"""A dead letter: the bytes of a refused record, where it stood, and why it was refused. Reads, and sends nothing."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple

from consumers.audit.books.books import named_error
from schemas.errors import WireError
from schemas.messages.base import Message
from schemas.ports.bus import Outgoing, Record
from schemas.ports.history import History
from schemas.wire.codec import Headers, decode
from schemas.wire.topics import DEAD_LETTERS

PREFIX = "dlq-"
RETRY_OF = "dlq-retry-of"
"""Header of a record that was sent once more: partition and offset of the refused one on the same topic."""


class Origin(NamedTuple):
    """Where the refused record stands."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"

    @property
    def mark(self) -> bytes:
        """As the content of the retry's header."""
        return f"{self.partition}@{self.offset}".encode()


@dataclass(frozen=True)
class Letter:
    """One record of the dead-letters topic. ``origin`` None: its headers do not tell."""

    record: Record
    origin: Origin | None
    error_class: str
    reason: str
    cut_from: int | None

    @property
    def offset(self) -> int:
        """Its own offset, by which commands name it."""
        return self.record.offset

    @property
    def size(self) -> int:
        """Bytes of the refused value, as they are kept."""
        return len(self.record.value or b"")

    @property
    def headers(self) -> Headers:
        """The refused record's own headers."""
        return tuple((name, content) for name, content in self.record.headers if not name.startswith(PREFIX))

    def decoded(self) -> Message:
        """What the bytes say to today's decoder.

        Raises:
            WireError: still nothing.
        """
        return decode(self.record.value, self.headers)

    def problem(self) -> str | None:
        """Why the bytes do not decode today, if so."""
        try:
            self.decoded()
        except WireError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def retry(self) -> Outgoing:
        """The refused record once more: same bytes, key, partition and headers, and a header that says so."""
        assert self.origin is not None, "checked before it is sent"
        topic, partition, _ = self.origin
        return Outgoing(
            topic, self.record.value, self.record.key, partition, (*self.headers, (RETRY_OF, self.origin.mark))
        )


def letter_of(record: Record) -> Letter:
    """Read the headers of a dead letter."""
    named = {name: (content or b"").decode(errors="replace") for name, content in record.headers}
    return Letter(
        record=record,
        origin=_origin(named),
        error_class=named_error(record.headers),
        reason=named.get("dlq-error", ""),
        cut_from=_number(named.get("dlq-cut-from")),
    )


def _origin(named: dict[str, str]) -> Origin | None:
    topic, partition, offset = (
        named.get("dlq-topic"),
        _number(named.get("dlq-partition")),
        _number(named.get("dlq-offset")),
    )
    if not topic or partition is None or offset is None:
        return None
    return Origin(topic, partition, offset)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 19 else None


async def read_letters(history: History, run: str) -> AsyncIterator[Letter]:
    """All dead letters of a run, oldest first."""
    async for record in history.records(DEAD_LETTERS.full_name(run)):
        yield letter_of(record)


async def read_letter(history: History, run: str, offset: int) -> Letter | None:
    """The dead letter at an offset, if there is one."""
    found = await history.fetch(DEAD_LETTERS.full_name(run), [(0, offset)])
    return letter_of(found[0, offset]) if found else None
