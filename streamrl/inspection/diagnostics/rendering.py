"""A record as one line for people, or as JSON for programs. Pure.

Invariant a_line_is_a_line: what strangers wrote into a record cannot move the cursor, colour or break lines.
"""

from datetime import datetime
from typing import Any

from streamrl.inspection.diagnostics.fields import ShownRecord, trained_in
from streamrl.schemas.control import (
    AnnouncedWeights,
    Control,
    DrainWorker,
    FleetTarget,
    FlowControl,
    OperatorCommand,
    RunFinished,
    WorkerClaimed,
)
from streamrl.schemas.identifiers import named_version
from streamrl.schemas.messages import Message
from streamrl.schemas.plain_text import plain_text
from streamrl.schemas.reports import Heartbeat, RefusedStep, SkipRecord, StepReport
from streamrl.schemas.trajectories import FinishedCompletion, PartialTrajectory, ReleaseOrder, TokenChunk, WorkOrder

HEAD = 60
"""Characters of a text within a line."""
KEY_METRICS = ("reward", "loss", "grad_norm", "off_policy/mean", "time/step")


def line_of(shown: ShownRecord) -> str:
    """Time, place, kind, and what matters most of it."""
    record = shown.record
    # As of the record, in local time: that is what is compared with other logs.
    time = datetime.fromtimestamp(record.timestamp).astimezone().strftime("%H:%M:%S.%f")[:-3]
    return f"{time} {record.partition}@{record.offset} {plain_text(_said(shown))}"


def _said(shown: ShownRecord) -> str:
    if shown.dead_letter is not None:
        dead_letter = shown.dead_letter
        return f"dead-letter from {dead_letter.origin or 'nowhere known'}  {dead_letter.size} bytes  {shown.problem}"
    if shown.message is None:
        return f"undecodable  key {shown.record.key}  {len(shown.record.value or b'')} bytes  {shown.problem}"
    if isinstance(shown.message, FinishedCompletion):
        return _of_trajectory(shown.message, shown.reward)
    return _of_message(shown.message)


def _of_message(message: Message) -> str:
    match message:
        case TokenChunk():
            ending = f"  {message.finish_reason.value}" if message.finish_reason else ""
            # Token positions within the completion, half open.
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
            what = message.trajectory_id or f"{message.partition}@{message.offset}"
            return f"skip {what}  {message.reason.value}  at step {message.step}  {message.detail}"
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
    # More than four would push the text out of the line.
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
            named = named_version(message.arm or None, message.version)
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
    # Quoted, so that it is seen where a stranger's text begins and ends within the line.
    return repr(text[:HEAD] + ("…" if len(text) > HEAD else ""))


def json_of(shown: ShownRecord) -> dict[str, Any]:
    """Everything, arrays included; ``message`` null: ``problem`` says why."""
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
        # Arrays included, as numbers.
        "message": None if shown.message is None else shown.message.model_dump(mode="json"),
        "problem": shown.problem,
    }
    if shown.dead_letter is not None:
        origin = shown.dead_letter.origin
        # A named tuple would become a JSON list without names.
        found |= {"error_class": shown.dead_letter.error_class, "origin": None if origin is None else origin._asdict()}
    return found
