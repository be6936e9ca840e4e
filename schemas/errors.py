"""The exception tree. Errors of libraries are mapped onto it where they enter, with ``from``."""

import errno
from collections.abc import Iterator, Sequence

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StreamRLError(Exception):
    """Root of every error this project raises on purpose."""

    exit_code = 1


class UserError(StreamRLError):
    """Something the user can mend; shown as one line without a traceback, and the exit code is 2."""

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
    """The topics of the run's name belong to another run, or to a life of it that its directory does not have."""


class WireVersionError(UserError):
    """Processes of a run are more than one version of the wire apart."""


class DiskFull(UserError):
    """No room is left for something that has to be written. To start again at once would change nothing."""

    exit_code = 5


class BadInput(UserError):
    """Too much of what arrives is bad, so that the fault lies with what writes it: a reward function, or a stranger."""


class OutOfMemory(UserError):
    """The device's memory does not hold what is to be computed.

    ``gradient_lost``: the gradient gathered so far may contain a part of it, and has to be made anew.
    """

    def __init__(self, message: str, *, gradient_lost: bool = False) -> None:
        super().__init__(message)
        self.gradient_lost = gradient_lost


class RewardLoadError(UserError):
    """A reward function that cannot be imported or has the wrong shape."""


class WireError(StreamRLError):
    """Bytes on the bus that are not a valid message; they go to dead-letters."""


class MalformedFrame(WireError):
    """The frame or one of its fields does not have the promised shape."""


class UnknownSchema(WireError):
    """The schema name or version in the headers is not one we know."""


class FrameTooLarge(WireError):
    """A frame or a field exceeds the size its schema allows."""


class BusError(StreamRLError):
    """The bus failed under us."""


class DeliveryUnknown(BusError):
    """A send timed out: the record may still be delivered. Re-send under the same id."""


class BusUnavailable(BusError):
    """No broker answered within the deadline."""


class TopicMissing(BusUnavailable):
    """The broker answers and has no such topic."""


class WeightsError(StreamRLError):
    """A weight version cannot be fetched, or must not be loaded."""


class ChecksumMismatch(WeightsError):
    """Fetched bytes differ from the manifest."""


class LateExport(WeightsError):
    """Weights of an older lineage than others in the store, or under a name that is taken: what is there stays."""


class CheckpointError(StreamRLError):
    """A checkpoint is incomplete or does not verify."""


class RankLost(StreamRLError):
    """A process of a trainer over several devices is gone, or does not answer: all of them begin anew."""


class EngineError(StreamRLError):
    """The generation engine failed."""


class PromptRefused(EngineError):
    """A prompt that cannot be sampled, however often it is tried: what is wrong with it, not with the engine.

    ``cause``: what all such prompts have in common, to count them by, such as "longer than 127 tokens".
    """

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause


class LifecycleError(StreamRLError):
    """An illegal move in a state machine: our own mistake."""


class EndUndone(StreamRLError):
    """Everybody was told that the run has ended, and its trainer goes on: who has left has to be started again."""

    exit_code = 6


class Superseded(StreamRLError):
    """A newer holder of the same role exists."""

    exit_code = 3


class DataLossRefused(StreamRLError):
    """Going on would lose data that nobody agreed to lose.

    ``holes``: where the data is known to be missing, as topic, partition, first missing offset and the offset after
    the last missing one.
    """

    exit_code = 4

    def __init__(self, message: str, holes: Sequence[tuple[str, int, int, int]] = ()) -> None:
        super().__init__(message)
        self.holes = tuple(holes)


def causes_of(error: BaseException | None, *, with_context: bool = False) -> Iterator[BaseException]:
    """The error, then what it was raised from, and so on; each once, also where ``raise`` made a circle of them.

    ``with_context``: an error that was raised from nothing is followed by the one that was being handled.
    """
    seen: list[BaseException] = []
    # By identity: an error of a library may have an equality of its own.
    while error is not None and not any(error is each for each in seen):
        yield error
        seen.append(error)
        error = error.__context__ if with_context and error.__cause__ is None else error.__cause__


def is_interrupted(error: BaseException) -> bool:
    """Whether an error came of an interrupt: up to Python 3.11, one that comes while a class is made is wrapped."""
    return any(isinstance(each, KeyboardInterrupt) for each in causes_of(error))


def lacks_room(error: BaseException | None) -> bool:
    """Whether a full disk, a quota that is used up, or a limit of files is at the bottom of an error."""
    return any(_says_no_room(each) for each in causes_of(error))


def _says_no_room(error: BaseException) -> bool:
    if isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in _NO_ROOM):
        return True
    # Libraries in Rust have the number in their text only.
    return any(f"(os error {number})" in str(error) for number in _NO_ROOM)
