"""The project's exceptions. Code that calls a library converts the library's errors to these, with ``raise … from``."""

import errno
from collections.abc import Iterator, Sequence

_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
    """Topics or checkpoints belong to another run, or to lineages that are missing in the run's directory."""


class WireVersionError(UserError):
    """Processes of a run speak wire versions that differ by more than one."""


class DiskFull(UserError):
    """The disk has no room for a file that has to be written. An immediate restart would fail again."""

    exit_code = 5


class BadInput(UserError):
    """Too many received records are bad. The cause is their writer: a reward function or a foreign process."""


class NothingToTrain(UserError):
    """No group in a long row could be trained, so that the run would wait for ever. A restart would not help."""

    exit_code = 4


class OutOfMemory(UserError):
    """A computation does not fit into the device's memory.

    ``gradient_lost``: the accumulated gradient may contain a part of the failed computation and must be recomputed.
    """

    def __init__(self, message: str, *, gradient_lost: bool = False) -> None:
        super().__init__(message)
        self.gradient_lost = gradient_lost


class RewardLoadError(UserError):
    """A reward function that cannot be loaded, or that fails too often to be used."""


class WireError(StreamRLError):
    """Bytes on the bus that are not a valid message; they go to the dead-letters topic."""


class MalformedFrame(WireError):
    """The frame or one of its fields does not have the shape that the schema requires."""


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
    """The weights' lineage is older than another in the store, or their name is taken. The store is not changed."""


class CheckpointError(StreamRLError):
    """A checkpoint cannot be written or read, is incomplete, or does not verify."""


class RankLost(StreamRLError):
    """A process of a multi-device trainer exited or does not answer. All its processes restart."""


class EngineError(StreamRLError):
    """The generation engine failed."""


class PromptRefused(EngineError):
    """A prompt that cannot be sampled, however often it is tried: the fault is in the prompt, not in the engine.

    ``cause``: the reason without details, for example "longer than 127 tokens". Refused prompts are counted by cause.
    """

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause


class LifecycleError(StreamRLError):
    """An illegal transition in a state machine: a bug in this project."""


class FinishedRunContinues(StreamRLError):
    """The trainer continues a run whose end was announced. Processes that exited must be started again."""

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
    """Yield the error, then the error that it was raised from, and so on. In a cycle, each error comes once.

    ``with_context``: an error without a ``from`` is followed by the error that was being handled at the time.
    """
    seen: list[BaseException] = []
    # Errors are compared by identity, because a library's error may define its own equality.
    while error is not None and not any(error is each for each in seen):
        yield error
        seen.append(error)
        error = error.__context__ if with_context and error.__cause__ is None else error.__cause__


def is_interrupted(error: BaseException) -> bool:
    """Whether Ctrl-C caused an error. Up to Python 3.11, an interrupt is wrapped while a class is created."""
    return any(isinstance(each, KeyboardInterrupt) for each in causes_of(error))


def is_disk_full_error(error: BaseException | None) -> bool:
    """Whether a full disk, an exhausted quota or a file-size limit caused an error."""
    return any(_reports_full_disk(each) for each in causes_of(error))


def _reports_full_disk(error: BaseException) -> bool:
    if isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in _DISK_FULL_ERRNOS):
        return True
    # Rust libraries report the error number only in the error's text.
    return any(f"(os error {number})" in str(error) for number in _DISK_FULL_ERRNOS)
