"""A worker's spans: samples for orders and for requests, and the weights that it adopts.

The spans of an order's sample are exported when its trajectory is sent. The span of a gateway's request is exported as
soon as the request is over; its parent is the gateway's span, whose context came with the request.
"""

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cachetools import FIFOCache

from streamrl.bus.port import Outgoing, Record, message_of
from streamrl.bus.waiting import in_thread
from streamrl.observability.tracing.context import (
    REMEMBERED,
    TRACEPARENT,
    AttributeValue,
    ExportSpan,
    LoggedTraces,
    SpanContext,
    TraceSpan,
    context_of,
    messaging_attributes,
    span_id_of,
)
from streamrl.observability.tracing.observer import OutgoingTrace, StoredRecord
from streamrl.producers.generation.engines.port import Engine, GenerationRequest, TokenDelta
from streamrl.schemas.codec import decode
from streamrl.schemas.control import AnnouncedWeights
from streamrl.schemas.files import sha256_of
from streamrl.schemas.identifiers import PolicyVersion, group_id_of, named_version
from streamrl.schemas.topics import CONTROL, TRAJECTORIES, WORK_ORDERS
from streamrl.schemas.trajectories import FinishReason, Trajectory
from streamrl.schemas.weights import MANIFEST


class ReceivedContext(NamedTuple):
    """The context of a record, and when the record was read, in seconds since the epoch."""

    context: SpanContext
    at_s: float


class _Announced(NamedTuple):
    version: str
    heard: ReceivedContext


class _Generated(NamedTuple):
    first_s: float
    ended_s: float


@dataclass
class _Served:
    """The progress of a request. ``ended_s``: when its last token came; 0: not yet."""

    started_at_s: float
    first_s: float = 0.0
    ended_s: float = 0.0
    tokens: int = 0
    versions: dict[PolicyVersion, None] = field(default_factory=dict)
    finish_reason: FinishReason | None = None


class WorkerTracer:
    """The tracer of one worker. Its engine reports what no message contains."""

    def __init__(
        self, run: str, worker_id: str, export: ExportSpan, logged: LoggedTraces, clock: Callable[[], float] = time.time
    ) -> None:
        self.writes = frozenset({TRAJECTORIES.full_name(run)})
        self.reads = frozenset({WORK_ORDERS.full_name(run), CONTROL.full_name(run)})
        self.clock = clock
        self._worker_id, self._export, self._logged = worker_id, export, logged
        self._orders: FIFOCache[str, ReceivedContext] = FIFOCache(REMEMBERED)
        # weights announced and not adopted yet, by manifest: versions of two policies may have equal numbers
        self._weights: FIFOCache[str, _Announced] = FIFOCache(64)
        self._generated: FIFOCache[str, _Generated] = FIFOCache(REMEMBERED)

    def received(self, record: Record, context: SpanContext) -> None:
        """Take an order, or an announcement of weights."""
        if record.key is None:
            return
        if record.topic.endswith(WORK_ORDERS.name):
            self._orders[record.key] = ReceivedContext(context, self.clock())
            self._logged.add(record.key, context)
        elif isinstance(message := message_of(record), AnnouncedWeights):
            named = named_version(message.series or None, message.version)
            self._weights[message.manifest_sha256] = _Announced(named, ReceivedContext(context, self.clock()))

    def follows(self, trajectory_id: str) -> bool:
        """Whether this sample belongs to a trace."""
        return self._orders.get(group_id_of(trajectory_id)) is not None

    def generated(self, trajectory_id: str, first_s: float) -> None:
        """Note that the engine gave a sample's last token now, and its first one at ``first_s``."""
        self._generated[trajectory_id] = _Generated(first_s, self.clock())

    def served(self, request: GenerationRequest, parent: SpanContext, served: _Served) -> None:
        """Export the span of a gateway's request that is over or was given up."""
        attributes: dict[str, AttributeValue] = {
            "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
            "gen_ai.usage.output_tokens": served.tokens,
            "streamrl.worker_id": self._worker_id,
            "streamrl.policy.versions": [*map(str, served.versions)],
        }
        if served.first_s:
            attributes["streamrl.time_to_first_token_s"] = served.first_s - served.started_at_s
        problem = "the request failed, or the requester left"
        if served.finish_reason is not None:
            attributes["streamrl.finish_reason"], problem = served.finish_reason.value, ""
        span_id = span_id_of(parent.span_id, self._worker_id, request.request_id, served.started_at_s)
        context, ended_s = SpanContext(parent.trace_id, span_id), served.ended_s or self.clock()
        self._export(
            TraceSpan("generate", context, parent, served.started_at_s, ended_s, attributes=attributes, problem=problem)
        )

    def adopted(self, manifest_sha256: str, began_s: float, ended_s: float) -> None:
        """Export the spans of weights that the engine adopted between these times."""
        if (announced := self._weights.pop(manifest_sha256, None)) is None:
            return  # the weights' step has no trace
        version, heard = announced
        attributes: dict[str, AttributeValue] = {
            "streamrl.worker_id": self._worker_id,
            "streamrl.policy.version": version,
        }
        for name, start_s, end_s in (("fetch weights", heard.at_s, began_s), ("adopt weights", began_s, ended_s)):
            context = SpanContext(heard.context.trace_id, span_id_of(self._worker_id, version, name, start_s))
            self._export(TraceSpan(name, context, heard.context, start_s, end_s, "consumer", attributes))

    def sending(self, record: Outgoing) -> OutgoingTrace | None:
        """Start the spans of a trajectory that is about to be sent."""
        heard = self._orders.get(record.key) if record.key is not None else None
        if heard is None or not isinstance(one := decode(record.value, record.headers), Trajectory):
            return None
        sample = self._part(heard.context, one, "sample")
        context = self._part(sample, one, "send trajectories")
        return OutgoingTrace(context, partial(self._sent, one, heard, sample, context))

    def _part(self, within: SpanContext, one: Trajectory, name: str) -> SpanContext:
        return SpanContext(within.trace_id, span_id_of(one.trajectory_id, one.attempt, self._worker_id, name))

    def _sent(
        self, one: Trajectory, heard: ReceivedContext, sample: SpanContext, context: SpanContext, stored: StoredRecord
    ) -> None:
        # two readings of the clock may differ a little; a child must not start before its parent
        start_s = min(heard.at_s, one.started_at)
        names = {**_names(one), "streamrl.worker_id": self._worker_id}
        self._export(TraceSpan("sample", sample, heard.context, start_s, stored.ended_s, "consumer", names))
        # a refused or abandoned sample was never generated; one that is sent again has these spans already
        if (generated := self._generated.pop(one.trajectory_id, None)) is not None:
            spent: dict[str, AttributeValue] = {
                "streamrl.time_to_first_token_s": max(0.0, generated.first_s - one.started_at)
            }
            # one after the other: a completion is scored after its last token
            self._child("generate", sample, one, one.started_at, generated.ended_s, _generation(one) | spent)
            self._child("reward", sample, one, generated.ended_s, one.finished_at, _rewards(one))
        sent = messaging_attributes("send", stored.topic, stored.partition, stored.offset, one.group_id)
        span = TraceSpan(
            "send trajectories", context, sample, stored.began_s, stored.ended_s, "producer", _names(one) | sent
        )
        self._export(span)

    def _child(
        self,
        name: str,
        parent: SpanContext,
        one: Trajectory,
        start_s: float,
        end_s: float,
        found: dict[str, AttributeValue],
    ) -> None:
        problem = "; ".join(one.reward_errors.values())[:300] if name == "reward" else ""
        context = self._part(parent, one, name)
        self._export(
            TraceSpan(
                name, context, parent, start_s, max(start_s, end_s), attributes=_names(one) | found, problem=problem
            )
        )


def _names(one: Trajectory) -> dict[str, AttributeValue]:
    return {
        "streamrl.trajectory_id": one.trajectory_id,
        "streamrl.group_id": one.group_id,
        "streamrl.attempt": one.attempt,
    }


def _generation(one: Trajectory) -> dict[str, AttributeValue]:
    return {
        "gen_ai.usage.input_tokens": len(one.prompt_token_ids),
        "gen_ai.usage.output_tokens": len(one.token_ids),
        "streamrl.predicted_length": one.predicted_length,
        "streamrl.finish_reason": one.finish_reason.value,
        "streamrl.policy.versions": [named_version(one.policy or None, span.version) for span in one.version_spans],
    }


def _rewards(one: Trajectory) -> dict[str, AttributeValue]:
    return {f"streamrl.reward.{name}": value for name, value in one.rewards.items() if value is not None}


class TracedEngine:
    """An ``Engine`` (``producers.generation.engines.port``) that traces the one inside."""

    def __init__(self, inner: Engine, tracer: WorkerTracer) -> None:
        self.name, self.max_num_seqs = inner.name, inner.max_num_seqs
        self._inner, self._tracer = inner, tracer

    @property
    def kv_tokens(self) -> int | None:
        """See the port."""
        return self._inner.kv_tokens

    async def start(self) -> None:
        """See the port."""
        await self._inner.start()

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        """See the port."""
        deltas = self._inner.generate(request)
        if request.traceparent and (parent := context_of(((TRACEPARENT, request.traceparent.encode()),))) is not None:
            return self._traced_request(request, parent, deltas)
        # samples outside of all traces, which may be nearly all, are not wrapped
        return self._traced_sample(request.request_id, deltas) if self._tracer.follows(request.request_id) else deltas

    async def _traced_sample(self, request_id: str, deltas: AsyncIterator[TokenDelta]) -> AsyncIterator[TokenDelta]:
        first_s: float | None = None
        try:
            async for delta in deltas:
                first_s = self._tracer.clock() if first_s is None else first_s
                # before the delta is passed on: after the last one the reader may not ask again
                if delta.finish_reason is not None:
                    self._tracer.generated(request_id, first_s)
                yield delta
        finally:
            # closes an abandoned generator now, not when it is garbage-collected, to free the engine's slot
            if (close := getattr(deltas, "aclose", None)) is not None:
                await close()

    async def _traced_request(
        self, request: GenerationRequest, parent: SpanContext, deltas: AsyncIterator[TokenDelta]
    ) -> AsyncIterator[TokenDelta]:
        served = _Served(self._tracer.clock())
        try:
            async for delta in deltas:
                served.first_s = served.first_s or self._tracer.clock()
                served.tokens += len(delta.token_ids)
                served.versions[delta.version] = None
                if delta.finish_reason is not None:
                    served.finish_reason, served.ended_s = delta.finish_reason, self._tracer.clock()
                yield delta
        finally:
            if (close := getattr(deltas, "aclose", None)) is not None:
                await close()
            self._tracer.served(request, parent, served)

    def interrupt(self, request_id: str) -> bool:
        """See the port."""
        return self._inner.interrupt(request_id)

    async def adopt(self, directory: Path, version: PolicyVersion) -> None:
        """See the port."""
        began_s = self._tracer.clock()
        await self._inner.adopt(directory, version)
        ended_s = self._tracer.clock()
        self._tracer.adopted(await in_thread(sha256_of, directory / MANIFEST), began_s, ended_s)

    async def close(self) -> None:
        """See the port."""
        await self._inner.close()
