"""What the gateway does, in spans: the trace of a trajectory goes from its first request to what became of it.

A call that is asked for alone has a trace, its choices in it. The calls of a session that continue each other, which
become one trajectory, have one together: its first call is the root, the others are below it. What is rewarded goes
onto the topic in the same trace, ``feedback`` being the wait for its reward, and so its training is in it, too. Workers
have the context of the call that they sample for, and a call links to the span of its requester, if that names one: it
is not a part of that trace, which is over long before the training is.

Invariant a_reward_finds_its_request: the trace id follows from what both know, so neither memory nor a file holds it,
and feedback after a restart of the gateway is in its request's trace.
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
    """Decides which requests are traced, and is told of them when they end (``answered``)."""

    def __init__(self, run: str, ratio: float, export: ExportSpan, logged: LoggedTraces) -> None:
        self.writes = frozenset({TRAJECTORIES.full_name(run)})
        self.reads: frozenset[str] = frozenset()
        self._run, self._ratio, self._export, self._logged = run, ratio, export, logged

    def begun(self, call: CompletionCall) -> str:
        """A call is to be sampled; the ``traceparent`` of its span, or nothing if it is not traced."""
        context = self._of_call(call, call.begun_at)
        return "" if context is None else context.traceparent

    def answered(self, running: RunningCall, begun_at: float) -> None:
        """A call is over, or nobody waits for it any more.

        ``begun_at``: when the first call of its trajectory was made, in seconds since the epoch; its own time if it is
        that call.
        """
        call = running.call
        context, root = self._of_call(call, begun_at), self._root(_name_of(call), begun_at)
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
        if begun := [reply.started_at for reply in replies if reply.started_at]:
            attributes["streamrl.time_to_first_token_s"] = max(0.0, min(begun) - call.created_at)
        if call.session is not None:
            attributes["streamrl.session"] = call.session
        problem = "" if running.is_over else "it failed, or its requester left"
        parent = None if context == root else root
        caller, told = context_of(((TRACEPARENT, call.requester.caller.encode()),)), self._of_call(call, call.begun_at)
        # What workers were told is another context if a call that ran at the same time took its place in the session.
        links = [link for link in (caller, told) if link is not None and link != context]
        self._export(
            TraceSpan("request", context, parent, call.created_at, ended_s, "internal", attributes, links, problem)
        )

    def received(self, record: Record, context: SpanContext) -> None:
        """It reads nothing that belongs to a trace."""

    def sending(self, record: Outgoing) -> OutgoingTrace | None:
        """A trajectory."""
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

    def _of_call(self, call: CompletionCall, begun_at: float) -> SpanContext | None:
        root = self._root(_name_of(call), begun_at)
        if root is None or begun_at == call.created_at:
            return root
        return SpanContext(root.trace_id, span_id_of(root.trace_id, "request", call.public_id))

    def _root(self, name: str, begun_at: float) -> SpanContext | None:
        # The time tells apart sessions of one name.
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
        told = names | rewards | ({"streamrl.turns": len(one.turns)} if one.turns else {})
        from_s = min(one.finished_at, stored.began_s)
        self._export(TraceSpan("feedback", waited, root, from_s, stored.ended_s, "internal", told))
        sent = names | messaging_attributes("send", stored.topic, stored.partition, stored.offset, one.group_id)
        self._export(TraceSpan("send trajectories", context, waited, stored.began_s, stored.ended_s, "producer", sent))


def _name_of(call: CompletionCall) -> str:
    """Of its trajectory's trace: the session's, or its own."""
    session = call.session if call.training.turn is not None else None
    return session or f"{DATASET}/{call.public_id}"
