"""Rebuilds the coordinator's state: replays its topics from their beginning to their current end."""

from streamrl.bus.port import Bus, Subscription, message_of
from streamrl.coordinator.policies import PolicyControl
from streamrl.coordinator.state import CoordinatorState
from streamrl.schemas.control import Control
from streamrl.schemas.identifiers import scope_of
from streamrl.schemas.reports import StepReport
from streamrl.schemas.topics import COMMANDS, CONTROL, EVALUATIONS, HEARTBEATS, STEPS

CLIENT_ID = "coordinator"
RECENT_HEARTBEATS = 5_000
"""Heartbeats read again after a restart, to know which incarnation of a worker came first.

They are ten minutes of eight workers.
"""


async def recover(bus: Bus, run: str, state: CoordinatorState, policies: PolicyControl) -> Subscription:
    """Replay control, then steps, into a new state; returns the steps subscription, placed after the replayed records.

    Raises:
        BusUnavailable: the broker does not answer, or the topics do not exist.
    """
    # Control first: reports are compared with the announcements.
    control = await bus.subscribe([CONTROL.full_name(run)], client_id=CLIENT_ID, start="earliest")
    try:
        await _replay(control, state, policies)
    finally:
        await control.close()
    return await follow_steps(bus, run, state, policies)


async def follow_steps(bus: Bus, run: str, state: CoordinatorState, policies: PolicyControl) -> Subscription:
    """A subscription to the followed policy's steps. Those present now are replayed into the state first."""
    topic = STEPS.full_name(scope_of(run, policies.followed.policy))
    steps = await bus.subscribe([topic], client_id=CLIENT_ID, start="earliest")
    try:
        await _replay(steps, state, policies)
    except BaseException:  # a cancellation too: no caller has the subscription yet
        await steps.close()
        raise
    return steps


async def subscribe_members(bus: Bus, run: str, last_command: int, *, evaluated: bool = False) -> Subscription:
    """A subscription to recent heartbeats, to operators' commands after the last one carried out, and to later records.

    With ``evaluated`` also to all evaluation reports. Commands that changed nothing are judged again, in the same
    order, and change nothing again.
    """
    topics = [HEARTBEATS.full_name(run), COMMANDS.full_name(run)]
    topics += [EVALUATIONS.full_name(run)] if evaluated else []
    # A subscription at the end is the only way to ask where the end is.
    now = await bus.subscribe(topics, client_id=CLIENT_ID, start="latest")
    try:
        ends, first = await now.positions(), await now.beginning_offsets()
    finally:
        await now.close()
    # Within what the broker holds: retention may have deleted an offset, and a recreated topic may not have it yet.
    heartbeats, commands = topics[:2]
    # Evaluation reports are few, one per version: all of them are read.
    wanted = {
        tp: {heartbeats: end - RECENT_HEARTBEATS, commands: min(last_command + 1, end)}.get(tp.topic, 0)
        for tp, end in ends.items()
    }
    start = {tp: max(first[tp], offset) for tp, offset in wanted.items()}
    return await bus.subscribe(topics, client_id=CLIENT_ID, start=start)


async def _replay(subscription: Subscription, state: CoordinatorState, policies: PolicyControl) -> None:
    """Read every partition up to the end that it has now."""
    ends = await subscription.end_offsets()
    # Compares positions, not records: the last offsets may be transaction markers, or compacted away.
    while any(position < ends[tp] for tp, position in (await subscription.positions()).items()):
        for record in await subscription.poll(timeout_s=1.0):
            match message_of(record, warn=True):
                case Control() as message:
                    policies.observe(message)
                    state.apply(message)
                case StepReport() as message if (report := policies.as_announced(message)) is not None:
                    state.ledger.observe_report(report)
