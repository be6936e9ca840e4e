"""Shows a record: its fields by name, a line for people, or JSON for programs. Pure.

Fields are those of the record, those of its message, and some derived ones.

Invariant records_cannot_control_the_terminal: text in a record cannot move the cursor, colour or break lines.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any, get_args

import numpy as np
from pydantic import BaseModel

from streamrl.bus.port import Record
from streamrl.inspection.dead_letters import DeadLetter, dead_letter_of
from streamrl.inspection.diagnostics.filters import ABSENT
from streamrl.schemas.control import (
    AnnouncedWeights,
    Control,
    ControlMessage,
    DrainWorker,
    FleetTarget,
    FlowControl,
    OperatorCommand,
    RunFinished,
    WeightsReady,
    WorkerClaimed,
)
from streamrl.schemas.errors import UserError, WireError
from streamrl.schemas.identifiers import named_version
from streamrl.schemas.messages import Message
from streamrl.schemas.plain_text import plain_text
from streamrl.schemas.reports import Heartbeat, RefusedStep, SkipRecord, StepReport
from streamrl.schemas.topics import DEAD_LETTERS, Topic
from streamrl.schemas.trajectories import (
    FinishedCompletion,
    PartialTrajectory,
    ReleaseOrder,
    TokenChunk,
    Trajectory,
    UngradedTrajectory,
    WorkOrder,
    total_reward,
)

EACH_COUNTS_ONCE: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class ShownRecord:
    """A record to show. ``dead_letter``: set for a record of the dead-letters topic.

    ``reward_weights``: known weights of the run's reward functions; a function without one has weight 1.
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
        """The total reward of a completion; None if it has no reward."""
        assert isinstance(self.message, FinishedCompletion)
        return total_reward(self.message.rewards, self.reward_weights)

    def field(self, path: str) -> Any:
        """The value of a field; ``ABSENT`` if the record has none. Dots in the path lead into values."""
        head, _, rest = path.partition(".")
        # The record's own fields come first, so a message cannot hide the record's position.
        for source in (_RECORD_FIELDS, _DEAD_LETTER_FIELDS if self.dead_letter else {}):
            if head in source:
                return _within(source[head](self), rest)
        if self.message is None:
            return ABSENT
        derived = _DERIVED.get(type(self.message), {})
        # A derived field never hides a real field of the message.
        if head in derived and head not in type(self.message).model_fields:
            return _within(derived[head](self), rest)
        return _within(self.message, path)


def shown_record(
    record: Record, topic: Topic | None, reward_weights: Mapping[str, float] = EACH_COUNTS_ONCE
) -> ShownRecord:
    """Decode a record to show it. It never raises for the record's contents."""
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
    """The first parts of all field names that records of a topic may have; None if there may be any name."""
    if topic is None:
        return None
    names = set(_RECORD_FIELDS)
    if topic.message is None:
        return names | set(_DEAD_LETTER_FIELDS)
    kinds: tuple[type[Message], ...] = (topic.message, *topic.also)
    # Control messages are a union; the catalogue names one of its kinds.
    if topic.message is WeightsReady:
        # ``Annotated[A | B, ...]``: its first argument is the union, whose arguments are the kinds.
        kinds = (*get_args(get_args(ControlMessage)[0]), *topic.also)
    for kind in kinds:
        properties = {name for name, value in vars(kind).items() if isinstance(value, property)}
        names |= set(kind.model_fields) | properties | set(_DERIVED.get(kind, {}))
    return names


def check_fields(fields: Sequence[str], topic: Topic | None) -> None:
    """Check that records of the topic can have these fields.

    Raises:
        UserError: there is no such field; the message names the closest one.
    """
    known = known_fields(topic)
    for path in fields:
        head = path.split(".")[0]
        if known is not None and topic is not None and head not in known:
            # Without an error, a misspelt name would silently filter out every record.
            close = difflib.get_close_matches(head, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(sorted(known))}"
            raise UserError(f"expected a field of {topic.name} in the filter, got {head!r}{hint}")


def _within(value: Any, path: str) -> Any:
    while path:
        if isinstance(value, Mapping) and path in value:
            return value[path]  # a metric's own name may contain dots
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
        # Arrays have no attribute of this name.
        if name == "length":
            return len(value)
        if name.isdigit():
            return value[int(name)] if int(name) < len(value) else ABSENT
        return getattr(value, name) if name in getattr(value, "_fields", ()) else ABSENT
    return ABSENT


def _is_property(kind: type, name: str) -> bool:
    return isinstance(getattr(kind, name, None), property)


def _plain(value: Any) -> Any:
    # For ``isinstance`` and json, a numpy integer is not an int.
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def trained_in(report: StepReport | RefusedStep) -> int:
    """Number of trajectories in a report's micro-batches."""
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


HEAD = 60
"""Characters of a text that a line shows."""
KEY_METRICS = ("reward", "loss", "grad_norm", "off_policy/mean", "time/step")


def line_of(shown: ShownRecord) -> str:
    """A line with a record's time, position, kind, and most important contents."""
    record = shown.record
    # The record's own time in local time, to compare it with other logs.
    time = datetime.fromtimestamp(record.timestamp).astimezone().strftime("%H:%M:%S.%f")[:-3]
    return f"{time} {record.partition}@{record.offset} {plain_text(_summary(shown))}"


def _summary(shown: ShownRecord) -> str:
    if shown.dead_letter is not None:
        dead_letter = shown.dead_letter
        return f"dead-letter from {dead_letter.origin or '?'}  {dead_letter.size} bytes  {shown.problem}"
    if shown.message is None:
        return f"undecodable  key {shown.record.key}  {len(shown.record.value or b'')} bytes  {shown.problem}"
    if isinstance(shown.message, FinishedCompletion):
        return _of_trajectory(shown.message, shown.reward)
    return _of_message(shown.message)


def _of_message(message: Message) -> str:
    match message:
        case TokenChunk():
            ending = f"  {message.finish_reason.value}" if message.finish_reason else ""
            # Token positions within the completion, as a half-open range.
            end = message.start + len(message.token_ids)
            place = f"{message.trajectory_id} [{message.start}, {end})"
            return f"tokens {place}  {message.worker_id}  v{message.version}{ending}"
        case PartialTrajectory():
            ending = f"  {message.finish_reason.value}" if message.finish_reason else ""
            place = f"{message.trajectory_id} [{message.start}, {message.end})"
            return f"partial {place}  {message.worker_id}  attempt {message.attempt}{ending}"
        case WorkOrder():
            return _of_order(message)
        case ReleaseOrder():
            orders = [f"{group} attempt {attempt}" for group, attempt in message.groups.items()]
            orders += [f"{group} attempt {attempt} settled" for group, attempt in message.settled.items()]
            return f"release-order → {message.worker_id}  {'  '.join(orders)}"
        case StepReport():
            last = "  finished" if message.finished else ""
            return (
                f"step {message.step}  v{message.version}  {len(message.group_ids)} groups, {trained_in(message)} "
                f"trajectories  {_metrics(message.metrics)}{last}"
            )
        case RefusedStep():
            return f"refused-step {message.step}  {trained_in(message)} trajectories  {message.problem}"
        case SkipRecord():
            name = message.trajectory_id or f"{message.partition}@{message.offset}"
            return f"skip {name}  {message.reason.value}  at step {message.step}  {message.detail}"
        case Heartbeat():
            return (
                f"heartbeat {message.worker_id}  {message.state.value}  v{message.weights}  {message.running} running, "
                f"{message.waiting} waiting of {message.capacity}  {message.tokens_per_s:.0f} tokens/s"
            )
        case OperatorCommand():
            return f"command {message.action} {message.worker_id or ''}  {message.reason}"
        case Control():
            return f"control {message.sequence}  {_of_control(message)}"
        case _:
            return f"{message.SCHEMA}  {_head(str(message))}"


def _of_order(order: WorkOrder) -> str:
    samples = f"{len(order.sample_indices)} of {order.num_generations} samples"
    return (
        f"work-order {order.group_id} → {order.worker_id}  {samples}"
        f"  bucket {order.estimate.bucket} (~{order.estimate.median} tokens)  attempt {order.attempt}"
        f"  v{order.admitted_version}  {_head(order.prompt.text)}"
    )


def _of_trajectory(message: FinishedCompletion, total: float | None) -> str:
    reward = "-" if total is None else f"{total:.3f}"
    # With more than four, the line would have no room for the text.
    spans = message.version_spans[:4]
    versions = " ".join(f"v{message.named(span.version)}" for span in spans) or f"v{message.admitted_version}"
    wrong = f"  reward failed: {', '.join(message.reward_errors)}" if message.reward_errors else ""
    return (
        f"{message.SCHEMA} {message.trajectory_id}  {message.worker_id}  {len(message.token_ids)} tokens "
        f"(~{message.predicted_length})  {message.finish_reason.value}  reward {reward}"
        f"  {versions}{wrong}  {_head(message.completion_text)}"
    )


def _of_control(message: Control) -> str:
    match message:
        case AnnouncedWeights():
            named = named_version(message.series or None, message.version)
            return f"weights v{named} of step {message.step} at {', '.join(message.relays)}"
        case FlowControl():
            return f"flow {message.mode}  {message.reason}"
        case DrainWorker():
            return f"drain {message.worker_id}  {message.reason}"
        case WorkerClaimed():
            return f"worker {message.worker_id} is {message.incarnation}"
        case FleetTarget():
            return f"{message.workers} workers wanted  {message.reason}"
        case RunFinished():
            return f"run finished at step {message.step}  {message.reason}"
        case _:
            return str(message)


def _metrics(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {metrics[name]:.4g}" for name in KEY_METRICS if name in metrics)


def _head(text: str) -> str:
    # Quoted, to show where the text from the record starts and ends within the line.
    return repr(text[:HEAD] + ("…" if len(text) > HEAD else ""))


def json_of(shown: ShownRecord) -> dict[str, Any]:
    """The whole record as JSON-safe data, including arrays. If ``message`` is null, ``problem`` says why."""
    record = shown.record
    found: dict[str, Any] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key": record.key,
        "headers": shown.text_headers,
        "size": len(record.value or b""),
        "schema": None if shown.message is None else shown.message.SCHEMA,
        # Including arrays, as lists of numbers.
        "message": None if shown.message is None else shown.message.model_dump(mode="json"),
        "problem": shown.problem,
    }
    if shown.dead_letter is not None:
        origin = shown.dead_letter.origin
        # A named tuple would become a JSON list without names.
        found |= {"error_class": shown.dead_letter.error_class, "origin": None if origin is None else origin._asdict()}
    return found
