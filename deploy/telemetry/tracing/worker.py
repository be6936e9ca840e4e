"""A worker's story: how each sample was generated, scored and sent, and when the weights of a step were taken up."""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from deploy.telemetry.context import Context, span_id_of
from deploy.telemetry.logged import LoggedTraces
from deploy.telemetry.memory import Memory
from deploy.telemetry.spans import Record, Span, Value, messaging
from deploy.telemetry.tracing.bus import Passage, Stored
from schemas.identifiers import PolicyVersion
from schemas.messages.control import WeightsReady
from schemas.messages.trajectories import Trajectory
from schemas.ports import bus
from schemas.wire.codec import decode
from schemas.wire.topics import CONTROL, TRAJECTORIES, WORK_ORDERS


class _Heard(NamedTuple):
    context: Context
    at_s: float


class _Generated(NamedTuple):
    first_s: float
    ended_s: float


class WorkerStory:
    """Of one worker; its engine tells it what no message says."""

    def __init__(
        self, run: str, worker_id: str, record: Record, logged: LoggedTraces, clock: Callable[[], float] = time.time
    ) -> None:
        self.writes = frozenset({TRAJECTORIES.full_name(run)})
        self.reads = frozenset({WORK_ORDERS.full_name(run), CONTROL.full_name(run)})
        self.clock = clock
        self._worker_id, self._record, self._logged = worker_id, record, logged
        self._orders: Memory[str, _Heard] = Memory()
        self._weights: Memory[PolicyVersion, _Heard] = Memory(64)
        self._generated: Memory[str, _Generated] = Memory()

    def read(self, record: bus.Record, context: Context) -> None:
        """An order, or weights that were announced."""
        if record.key is None:
            return
        if record.topic.endswith(WORK_ORDERS.name):
            self._orders.put(record.key, _Heard(context, self.clock()))
            self._logged.note(record.key, context)
        elif isinstance(message := record.message(), WeightsReady):
            self._weights.put(message.version, _Heard(context, self.clock()))

    def follows(self, trajectory_id: str) -> bool:
        """Whether this sample belongs to a trace."""
        return self._orders.get(trajectory_id.rpartition("/")[0]) is not None

    def generated(self, trajectory_id: str, first_s: float) -> None:
        """The engine gave the last token now, and the first one then."""
        self._generated.put(trajectory_id, _Generated(first_s, self.clock()))

    def adopted(self, version: PolicyVersion, began_s: float) -> None:
        """The engine took up these weights from then to now."""
        if (heard := self._weights.pop(version)) is None:
            return
        attributes: dict[str, Value] = {
            "streamrl.worker_id": self._worker_id,
            "streamrl.policy.version": str(version),
        }
        for name, start_s, end_s in (("fetch weights", heard.at_s, began_s), ("adopt weights", began_s, self.clock())):
            context = Context(heard.context.trace_id, span_id_of(self._worker_id, version, name, start_s))
            self._record(Span(name, context, heard.context, start_s, end_s, "consumer", attributes))

    def sending(self, record: bus.Outgoing) -> Passage | None:
        """A trajectory."""
        heard = self._orders.get(record.key) if record.key is not None else None
        if heard is None or not isinstance(one := decode(record.value, record.headers), Trajectory):
            return None
        sample = self._part(heard.context, one, "sample")
        context = self._part(sample, one, "send trajectories")
        return Passage(context, partial(self._sent, one, heard, sample, context))

    def _part(self, within: Context, one: Trajectory, name: str) -> Context:
        return Context(within.trace_id, span_id_of(one.trajectory_id, one.attempt, self._worker_id, name))

    def _sent(self, one: Trajectory, heard: _Heard, sample: Context, context: Context, stored: Stored) -> None:
        begun_s = min(heard.at_s, one.started_at)
        names = {**_of(one), "streamrl.worker_id": self._worker_id}
        self._record(Span("sample", sample, heard.context, begun_s, stored.ended_s, "consumer", names))
        if (generated := self._generated.pop(one.trajectory_id)) is not None:
            spent: dict[str, Value] = {"streamrl.time_to_first_token_s": max(0.0, generated.first_s - one.started_at)}
            self._tell("generate", sample, one, one.started_at, generated.ended_s, _generation(one) | spent)
            self._tell("reward", sample, one, generated.ended_s, one.finished_at, _rewards(one))
        sent = messaging("send", stored.topic, stored.partition, stored.offset, one.group_id)
        span = Span("send trajectories", context, sample, stored.began_s, stored.ended_s, "producer", _of(one) | sent)
        self._record(span)

    def _tell(
        self, name: str, parent: Context, one: Trajectory, start_s: float, end_s: float, found: dict[str, Value]
    ) -> None:
        problem = "; ".join(one.reward_errors.values())[:300] if name == "reward" else ""
        context = self._part(parent, one, name)
        self._record(
            Span(name, context, parent, start_s, max(start_s, end_s), attributes=_of(one) | found, problem=problem)
        )


def _of(one: Trajectory) -> dict[str, Value]:
    return {
        "streamrl.trajectory_id": one.trajectory_id,
        "streamrl.group_id": one.group_id,
        "streamrl.attempt": one.attempt,
    }


def _generation(one: Trajectory) -> dict[str, Value]:
    return {
        "gen_ai.usage.input_tokens": len(one.prompt_token_ids),
        "gen_ai.usage.output_tokens": len(one.token_ids),
        "streamrl.predicted_length": one.predicted_length,
        "streamrl.finish_reason": one.finish_reason.value,
        "streamrl.policy.versions": [str(span.version) for span in one.version_spans],
    }


def _rewards(one: Trajectory) -> dict[str, Value]:
    return {f"streamrl.reward.{name}": value for name, value in one.rewards.items() if value is not None}
