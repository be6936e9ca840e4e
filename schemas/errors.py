"""The exception tree. Code that calls a library converts the library's errors to these, with ``from``."""

import errno
from collections.abc import Iterator, Sequence

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StreamRLError(Exception):
    """Root of every error this project raises on purpose."""

    exit_code = 1


class UserError(StreamRLError):
    """A problem that the user can fix. It is shown as one line without a traceback, and the exit code is 2."""

    exit_code = 2


class SettingsError(UserError):
    """A configuration key or value that is unknown, missing or contradictory."""


class BrokerError(UserError):
    """The Kafka broker cannot be started or reached."""


class ModelError(UserError):
    """A model or tokenizer that cannot be loaded."""


class DataError(UserError):
    """A data set or prompt file that cannot be read."""


class IdentityError(UserError):
    """The topics of the run's name belong to another run, or to lineages that the run's directory does not have."""


class WireVersionError(UserError):
    """Processes of a run speak wire versions that differ by more than one."""


class DiskFull(UserError):
    """The disk has no room for a file that has to be written. An immediate restart would fail again."""

    exit_code = 5


class BadInput(UserError):
    """Too many arriving records are bad, so their writer must be at fault: a reward function or a foreign process."""


class OutOfMemory(UserError):
    """A computation does not fit into the device's memory.

    ``gradient_lost``: the accumulated gradient may contain a part of the failed computation and must be recomputed.
    """

    def __init__(self, message: str, *, gradient_lost: bool = False) -> None:
        super().__init__(message)
        self.gradient_lost = gradient_lost


class RewardLoadError(UserError):
    """A reward function that cannot be imported or has the wrong shape."""


class WireError(StreamRLError):
    """Bytes on the bus that are not a valid message; they go to the dead-letters topic."""


class MalformedFrame(WireError):
    """The frame or one of its fields does not have the promised shape."""


class UnknownSchema(WireError):
    """The schema name or version in the headers is unknown."""


class FrameTooLarge(WireError):
    """A frame or a field exceeds the size its schema allows."""


class BusError(StreamRLError):
    """The bus failed."""


class DeliveryUnknown(BusError):
    """A send timed out: the record may still be delivered. Re-send under the same id."""


class BusUnavailable(BusError):
    """No broker answered within the deadline."""


class TopicMissing(BusUnavailable):
    """The broker answers, but the topic does not exist."""


class WeightsError(StreamRLError):
    """A weight version cannot be fetched, or must not be loaded."""


class ChecksumMismatch(WeightsError):
    """Fetched bytes differ from the manifest."""


class LateExport(WeightsError):
    """The weights' lineage is older than others in the store, or their name is taken. The store stays unchanged."""


class CheckpointError(StreamRLError):
    """A checkpoint is incomplete or does not verify."""


class RankLost(StreamRLError):
    """A process of a multi-device trainer exited or does not answer. All its processes restart."""


class EngineError(StreamRLError):
    """The generation engine failed."""


class PromptRefused(EngineError):
    """A prompt that no attempt can sample: the fault is in the prompt, not in the engine.

    ``cause``: the common reason by which refused prompts are counted, for example "longer than 127 tokens".
    """

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause


class LifecycleError(StreamRLError):
    """An illegal transition in a state machine: a bug in this project."""


class FinishedRunContinues(StreamRLError):
    """The trainer continues a run after its end was announced. Processes that exited have to be started again."""

    exit_code = 6


class Superseded(StreamRLError):
    """A newer process has taken over the same role."""

    exit_code = 3


class DataLossRefused(StreamRLError):
    """Continuing would lose data, and the user has not allowed that.

    ``holes``: known missing data, as topic, partition, first missing offset and the offset after the last missing one.
    """

    exit_code = 4

    def __init__(self, message: str, holes: Sequence[tuple[str, int, int, int]] = ()) -> None:
        super().__init__(message)
        self.holes = tuple(holes)


def causes_of(error: BaseException | None, *, with_context: bool = False) -> Iterator[BaseException]:
    """The error, then the error it was raised from, and so on. Each comes once, even if ``raise`` made a cycle.

    ``with_context``: an error without a ``from`` is followed by the error that was being handled.
    """
    seen: list[BaseException] = []
    # By identity: a library's error may define its own equality.
    while error is not None and not any(error is each for each in seen):
        yield error
        seen.append(error)
        error = error.__context__ if with_context and error.__cause__ is None else error.__cause__


def is_interrupted(error: BaseException) -> bool:
    """Whether an interrupt caused an error. Up to Python 3.11, an interrupt while a class is made gets wrapped."""
    return any(isinstance(each, KeyboardInterrupt) for each in causes_of(error))


def is_disk_full_error(error: BaseException | None) -> bool:
    """Whether a full disk, an exhausted quota or a file-size limit caused an error."""
    return any(_says_no_room(each) for each in causes_of(error))


def _says_no_room(error: BaseException) -> bool:
    if isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in _NO_ROOM):
        return True
    # Rust libraries report the number only in the error's text.
    return any(f"(os error {number})" in str(error) for number in _NO_ROOM)
