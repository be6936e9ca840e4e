"""The fields of a record by name: of the record itself, of its message, and some that are worked out. Pure."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, get_args

import numpy as np
from pydantic import BaseModel

from streamrl.bus.port import Record
from streamrl.inspection.dead_letters import DeadLetter, dead_letter_of
from streamrl.inspection.diagnostics.filters import ABSENT
from streamrl.schemas.control import ControlMessage, WeightsReady
from streamrl.schemas.errors import UserError, WireError
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import RefusedStep, StepReport
from streamrl.schemas.topics import DEAD_LETTERS, Topic
from streamrl.schemas.trajectories import (
    FinishedCompletion,
    PartialTrajectory,
    TokenChunk,
    Trajectory,
    UngradedTrajectory,
    WorkOrder,
    total_reward,
)

EACH_COUNTS_ONCE: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class ShownRecord:
    """A record as it is shown. ``dead_letter``: it stands on that topic, and its bytes are of another one.

    ``reward_weights``: of the run's reward functions, as far as they are known; a function without one counts once.
    """

    record: Record
    message: Message | None
    problem: str | None
    reward_weights: Mapping[str, float]
    dead_letter: DeadLetter | None = None

    @cached_property
    def text_headers(self) -> dict[str, str]:
        """Headers as text."""
        return {name: (content or b"").decode(errors="backslashreplace") for name, content in self.record.headers}

    @property
    def reward(self) -> float | None:
        """Of a completion: its total reward; none if it has none."""
        assert isinstance(self.message, FinishedCompletion)
        return total_reward(self.message.rewards, self.reward_weights)

    def field(self, path: str) -> Any:
        """The value of a field, ``ABSENT`` if the record has none; dots lead into values."""
        head, _, rest = path.partition(".")
        # The record's own fields first: a message cannot hide where it stands.
        for source in (_RECORD_FIELDS, _DEAD_LETTER_FIELDS if self.dead_letter else {}):
            if head in source:
                return _within(source[head](self), rest)
        if self.message is None:
            return ABSENT
        derived = _DERIVED.get(type(self.message), {})
        # A field that a message really has is never shadowed by one that is worked out.
        if head in derived and head not in type(self.message).model_fields:
            return _within(derived[head](self), rest)
        return _within(self.message, path)


def shown_record(
    record: Record, topic: Topic | None, reward_weights: Mapping[str, float] = EACH_COUNTS_ONCE
) -> ShownRecord:
    """Decode a record; whatever is in it, this does not raise."""
    if topic is DEAD_LETTERS:
        dead_letter = dead_letter_of(record)
        return ShownRecord(
            record, None, f"{dead_letter.error_class}: {dead_letter.reason}", reward_weights, dead_letter
        )
    try:
        return ShownRecord(record, record.message(), None, reward_weights)
    except WireError as error:
        return ShownRecord(record, None, f"{type(error).__name__}: {error}", reward_weights)


def known_fields(topic: Topic | None) -> set[str] | None:
    """First parts of all names that records of a topic may have; none if any name may be there."""
    if topic is None:
        return None
    names = set(_RECORD_FIELDS)
    if topic.message is None:
        return names | set(_DEAD_LETTER_FIELDS)
    kinds: tuple[type[Message], ...] = (topic.message, *topic.also)
    # Control messages are a union; the catalogue names one of them.
    if topic.message is WeightsReady:
        # ``Annotated[A | B, ...]``: its first argument is the union, whose arguments are the kinds.
        kinds = (*get_args(get_args(ControlMessage)[0]), *topic.also)
    for kind in kinds:
        properties = {name for name, value in vars(kind).items() if isinstance(value, property)}
        names |= set(kind.model_fields) | properties | set(_DERIVED.get(kind, {}))
    return names


def check_fields(fields: Sequence[str], topic: Topic | None) -> None:
    """Refuse a field that no record of the topic can have.

    Raises:
        UserError: there is one; the nearest right name is given.
    """
    known = known_fields(topic)
    for path in fields:
        head = path.split(".")[0]
        if known is not None and topic is not None and head not in known:
            # A misspelt name would otherwise filter everything out in silence.
            close = difflib.get_close_matches(head, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(sorted(known))}"
            raise UserError(f"expected a field of {topic.name} in the filter, got {head!r}{hint}")


def _within(value: Any, path: str) -> Any:
    while path:
        if isinstance(value, Mapping) and path in value:
            return value[path]  # names of metrics have dots and slashes of their own
        head, _, path = path.partition(".")
        value = _part(value, head)
        if value is ABSENT:
            return ABSENT
    return _plain(value)


def _part(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(name, ABSENT)
    if isinstance(value, BaseModel):
        fields = type(value)
        return getattr(value, name) if name in fields.model_fields or _is_property(fields, name) else ABSENT
    if isinstance(value, tuple | list | np.ndarray):
        # Arrays have no name for it of their own.
        if name == "length":
            return len(value)
        if name.isdigit():
            return value[int(name)] if int(name) < len(value) else ABSENT
        return getattr(value, name) if name in getattr(value, "_fields", ()) else ABSENT
    return ABSENT


def _is_property(kind: type, name: str) -> bool:
    return isinstance(getattr(kind, name, None), property)


def _plain(value: Any) -> Any:
    # To ``isinstance`` and to json, a numpy integer is no int.
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def trained_in(report: StepReport | RefusedStep) -> int:
    """Trajectories in its micro-batches."""
    return sum(len(batch) for batch in report.micro_batches)


_RECORD_FIELDS: dict[str, Callable[[ShownRecord], Any]] = {
    "topic": lambda each: each.record.topic,
    "partition": lambda each: each.record.partition,
    "offset": lambda each: each.record.offset,
    "key": lambda each: each.record.key,
    "timestamp": lambda each: each.record.timestamp,
    "size": lambda each: len(each.record.value or b""),
    "headers": lambda each: each.text_headers,
    "schema": lambda each: each.text_headers.get("schema", ABSENT),
    "problem": lambda each: each.problem,
}
_DEAD_LETTER_FIELDS: dict[str, Callable[[ShownRecord], Any]] = {
    "error_class": lambda each: each.dead_letter and each.dead_letter.error_class,
    "reason": lambda each: each.dead_letter and each.dead_letter.reason,
    "origin": lambda each: each.dead_letter and str(each.dead_letter.origin),
    "origin_topic": lambda each: each.dead_letter and each.dead_letter.origin and each.dead_letter.origin.topic,
    "origin_partition": lambda each: each.dead_letter and each.dead_letter.origin and each.dead_letter.origin.partition,
    "origin_offset": lambda each: each.dead_letter and each.dead_letter.origin and each.dead_letter.origin.offset,
}
_OF_COMPLETIONS: dict[str, Callable[[Any], Any]] = {
    "length": lambda each: len(each.message.token_ids),
    "prompt_length": lambda each: len(each.message.prompt_token_ids),
    "reward": lambda each: each.reward,
    "seconds": lambda each: each.message.finished_at - each.message.started_at,
}
_DERIVED: dict[type[Message], dict[str, Callable[[Any], Any]]] = {
    Trajectory: _OF_COMPLETIONS,
    UngradedTrajectory: _OF_COMPLETIONS,
    TokenChunk: {"length": lambda each: len(each.message.token_ids)},
    PartialTrajectory: {"length": lambda each: len(each.message.token_ids)},
    WorkOrder: {
        "samples": lambda each: len(each.message.sample_indices),
        "prompt_id": lambda each: each.message.prompt.prompt_id,
        "bucket": lambda each: each.message.estimate.bucket,
    },
    StepReport: {
        "trajectories": lambda each: trained_in(each.message),
        "groups": lambda each: len(each.message.group_ids),
        "reward": lambda each: each.message.metrics.get("reward", ABSENT),
    },
    RefusedStep: {
        "trajectories": lambda each: trained_in(each.message),
        "groups": lambda each: len(each.message.group_ids),
    },
}
