"""The dispatcher's story: an order begins the trace of its group; one that is sent again goes on with it."""

from functools import partial

from deploy.telemetry.context import Context, is_sampled, span_id_of, trace_id_of
from deploy.telemetry.logged import LoggedTraces
from deploy.telemetry.spans import Record, Span, messaging
from deploy.telemetry.tracing.bus import Passage, Stored
from schemas.messages.prompts import WorkOrder
from schemas.ports import bus
from schemas.wire.codec import decode
from schemas.wire.topics import WORK_ORDERS


class DispatcherStory:
    """Decides which groups are traced: the trace id follows from the run, the group and when it was created."""

    def __init__(self, run: str, ratio: float, record: Record, logged: LoggedTraces) -> None:
        self.writes = frozenset({WORK_ORDERS.full_name(run)})
        self.reads: frozenset[str] = frozenset()
        self._run, self._ratio, self._record, self._logged = run, ratio, record, logged

    def sending(self, record: bus.Outgoing) -> Passage | None:
        """A work order."""
        order = decode(record.value, record.headers)
        if not isinstance(order, WorkOrder):
            return None
        trace_id = trace_id_of(self._run, order.group_id, order.created_at)
        if not is_sampled(trace_id, self._ratio):
            return None
        root = Context(trace_id, span_id_of(trace_id, "dispatch"))
        self._logged.note(order.group_id, root)
        again = Context(trace_id, span_id_of(trace_id, "dispatch", order.attempt))
        context = again if order.attempt else root
        return Passage(context, partial(self._sent, order, context, root if order.attempt else None))

    def read(self, record: bus.Record, context: Context) -> None:
        """It reads nothing that belongs to a trace."""

    def _sent(self, order: WorkOrder, context: Context, parent: Context | None, stored: Stored) -> None:
        attributes = messaging("send", stored.topic, stored.partition, stored.offset, order.group_id) | {
            "streamrl.group_id": order.group_id,
            "streamrl.prompt_id": order.prompt.prompt_id,
            "streamrl.prompt_position": order.position,
            "streamrl.worker_id": order.worker_id,
            "streamrl.attempt": order.attempt,
            "streamrl.samples": len(order.sample_indices),
            "streamrl.predicted_length": order.estimate.median,
            "streamrl.bucket": order.estimate.bucket,
            "streamrl.policy.admitted_version": str(order.admitted_version),
        }
        start_s = stored.began_s if order.attempt else min(order.created_at, stored.began_s)
        self._record(Span("dispatch", context, parent, start_s, stored.ended_s, "producer", attributes))
