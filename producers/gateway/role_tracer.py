"""The gateway's spans: a trajectory's trace leads from its first request to its training.

A call outside of sessions has a trace of its own, which includes all of its choices. Calls of a session that continue
each other become one trajectory and share a trace: the first call is its root, the others are below it. A rewarded
trajectory is published in the same trace, in which the span ``feedback`` is the wait for the reward. So the trace
includes the training, too. Workers get the context of the call that they sample for. A call links to the span of its
requester, if the requester sent one. It is not part of the requester's trace, which is over long before the training.

Invariant rewards_join_the_trace_of_their_request: the trace id is computed from the call's name and time, which the
trajectory has, too. So it is stored nowhere, and feedback after a restart of the gateway joins its request's trace.
"""

from functools import partial

from streamrl.bus.port import Outgoing, Record
from streamrl.observability.tracing.context import (
    TRACEPARENT,
    AttributeValue,
    ExportSpan,
    LoggedTraces,
    SpanContext,
    TraceSpan,
    context_of,
    is_sampled,
    messaging_attributes,
    span_id_of,
    trace_id_of,
)
from streamrl.observability.tracing.observer import OutgoingTrace, StoredRecord
from streamrl.producers.gateway.calls import DATASET, CompletionCall, RunningCall
from streamrl.schemas.codec import decode
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory


class GatewayTracer:
    """Decides which requests are traced, and exports their spans when they end (``answered``)."""

    def __init__(self, run: str, ratio: float, export: ExportSpan, logged: LoggedTraces) -> None:
        self.writes = frozenset({TRAJECTORIES.full_name(run)})
        self.reads: frozenset[str] = frozenset()
        self._run, self._ratio, self._export, self._logged = run, ratio, export, logged

    def begun(self, call: CompletionCall) -> str:
        """A call starts. Returns the ``traceparent`` of its span, for workers; empty if the call is not traced."""
        context = self._call_context(call, call.begun_at)
        return "" if context is None else context.traceparent

    def answered(self, running: RunningCall, begun_at: float) -> None:
        """A call is over, or its requester left.

        ``begun_at``: when its trajectory's first call was made, in seconds since the epoch. That may be this call.
        """
        call = running.call
        context, root = self._call_context(call, begun_at), self._root(_name_of(call), begun_at)
        if context is None or root is None:
            return
        replies = running.replies
        ended_s = max([call.created_at, *(reply.finished_at or reply.started_at for reply in replies)])
        spans = [span for reply in replies for span in reply.sampled.version_spans()]
        workers = [worker_id for reply in replies for worker_id, _ in reply.sequence.parts]
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": "chat" if call.kind == "chat" else "text_completion",
            "gen_ai.request.model": running.model.name,
            "gen_ai.usage.input_tokens": running.prompt_tokens,
            "gen_ai.usage.output_tokens": running.completion_tokens,
            "streamrl.call_id": call.public_id,
            "streamrl.policy.versions": [str(version) for version in sorted({span.version for span in spans})],
            "streamrl.worker_ids": [*dict.fromkeys(workers)],
        }
        if started := [reply.started_at for reply in replies if reply.started_at]:
            attributes["streamrl.time_to_first_token_s"] = max(0.0, min(started) - call.created_at)
        if call.session is not None:
            attributes["streamrl.session"] = call.session
        problem = "" if running.is_over else "it failed, or its requester left"
        parent = None if context == root else root
        caller = context_of(((TRACEPARENT, call.requester.caller.encode()),))
        # The workers got another context if a call that ran at the same time took this call's place in the session.
        sent_to_workers = self._call_context(call, call.begun_at)
        links = [link for link in (caller, sent_to_workers) if link is not None and link != context]
        self._export(
            TraceSpan("request", context, parent, call.created_at, ended_s, "internal", attributes, links, problem)
        )

    def received(self, record: Record, context: SpanContext) -> None:
        """Do nothing: the gateway reads no records that belong to a trace."""

    def sending(self, record: Outgoing) -> OutgoingTrace | None:
        """Trace a trajectory that is published."""
        one = decode(record.value, record.headers)
        if not isinstance(one, Trajectory):
            return None
        root = self._root(one.session or one.prompt_id, one.created_at)
        if root is None:
            return None
        self._logged.add(one.group_id, root)
        waited = SpanContext(root.trace_id, span_id_of(one.trajectory_id, "feedback"))
        context = SpanContext(root.trace_id, span_id_of(one.trajectory_id, "send trajectories"))
        return OutgoingTrace(context, partial(self._sent, one, root, waited, context))

    def _call_context(self, call: CompletionCall, begun_at: float) -> SpanContext | None:
        root = self._root(_name_of(call), begun_at)
        if root is None or begun_at == call.created_at:
            return root
        return SpanContext(root.trace_id, span_id_of(root.trace_id, "request", call.public_id))

    def _root(self, name: str, begun_at: float) -> SpanContext | None:
        # The time distinguishes sessions of the same name.
        trace_id = trace_id_of(self._run, name, begun_at)
        return SpanContext(trace_id, span_id_of(trace_id, "request")) if is_sampled(trace_id, self._ratio) else None

    def _sent(
        self, one: Trajectory, root: SpanContext, waited: SpanContext, context: SpanContext, stored: StoredRecord
    ) -> None:
        names: dict[str, AttributeValue] = {
            "streamrl.trajectory_id": one.trajectory_id,
            "streamrl.group_id": one.group_id,
        }
        rewards = {f"streamrl.reward.{name}": value for name, value in one.rewards.items() if value is not None}
        attributes = names | rewards | ({"streamrl.turns": len(one.turns)} if one.turns else {})
        from_s = min(one.finished_at, stored.began_s)
        self._export(TraceSpan("feedback", waited, root, from_s, stored.ended_s, "internal", attributes))
        sent = names | messaging_attributes("send", stored.topic, stored.partition, stored.offset, one.group_id)
        self._export(TraceSpan("send trajectories", context, waited, stored.began_s, stored.ended_s, "producer", sent))


def _name_of(call: CompletionCall) -> str:
    """Name of the trace of a call's trajectory: the session's name, or the call's own."""
    session = call.session if call.training.turn is not None else None
    return session or f"{DATASET}/{call.public_id}"
