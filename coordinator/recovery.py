"""Rebuilds the coordinator's state by replaying its topics from their beginning to their present end."""

from streamrl.bus.port import Bus, Subscription, message_of
from streamrl.coordinator.policies import PolicyControl
from streamrl.coordinator.state import CoordinatorState
from streamrl.schemas.control import Control
from streamrl.schemas.identifiers import scope_of
from streamrl.schemas.reports import StepReport
from streamrl.schemas.topics import COMMANDS, CONTROL, EVALUATIONS, HEARTBEATS, STEPS

CLIENT_ID = "coordinator"
RECENT_HEARTBEATS = 5_000
"""Read again after a restart, to know which incarnation of a worker came first: ten minutes of eight workers."""


async def recover(bus: Bus, run: str, state: CoordinatorState, policies: PolicyControl) -> Subscription:
    """Replay control, then steps, into a new state; returns the steps subscription, placed behind what was replayed.

    Raises:
        BusUnavailable: the broker does not answer, or the topics do not exist.
    """
    # Control first: reports that are read after it are compared with what was announced.
    control = await bus.subscribe([CONTROL.full_name(run)], client_id=CLIENT_ID, start="earliest")
    try:
        await _replay(control, state, policies)
    finally:
        await control.close()
    return await follow_steps(bus, run, state, policies)


async def follow_steps(bus: Bus, run: str, state: CoordinatorState, policies: PolicyControl) -> Subscription:
    """A subscription to the steps of the policy that is followed, placed behind those that were noted in the state."""
    topic = STEPS.full_name(scope_of(run, policies.followed.policy))
    steps = await bus.subscribe([topic], client_id=CLIENT_ID, start="earliest")
    try:
        await _replay(steps, state, policies)
    except BaseException:  # a cancellation too: nobody else has it yet
        await steps.close()
        raise
    return steps


async def subscribe_members(bus: Bus, run: str, last_command: int, *, evaluated: bool = False) -> Subscription:
    """Recent heartbeats, the operators' commands behind the last one carried out, and all that follows.

    And what was evaluated, of a run that has an evaluation.

    Commands that changed nothing are judged again, in the same order, and change nothing again.
    """
    topics = [HEARTBEATS.full_name(run), COMMANDS.full_name(run)]
    topics += [EVALUATIONS.full_name(run)] if evaluated else []
    # A subscription at the end is the only way to ask where the end is.
    now = await bus.subscribe(topics, client_id=CLIENT_ID, start="latest")
    try:
        ends, first = await now.positions(), await now.beginning_offsets()
    finally:
        await now.close()
    # Within what the broker holds: retention may have deleted a place, and a topic made again may not reach it yet.
    heartbeats, commands = topics[:2]
    # Evaluation reports are few, one a version: all of them are read.
    wanted = {
        tp: {heartbeats: end - RECENT_HEARTBEATS, commands: min(last_command + 1, end)}.get(tp.topic, 0)
        for tp, end in ends.items()
    }
    start = {tp: max(first[tp], offset) for tp, offset in wanted.items()}
    return await bus.subscribe(topics, client_id=CLIENT_ID, start=start)


async def _replay(subscription: Subscription, state: CoordinatorState, policies: PolicyControl) -> None:
    """Read until every partition has reached the end it had at the start; bounded by that end."""
    ends = await subscription.end_offsets()
    # By positions and not by records: the last offsets may be transaction markers, or compacted away.
    while any(position < ends[tp] for tp, position in (await subscription.positions()).items()):
        for record in await subscription.poll(timeout_s=1.0):
            match message_of(record, warn=True):
                case Control() as message:
                    policies.observe(message)
                    state.apply(message)
                case StepReport() as message if (report := policies.as_announced(message)) is not None:
                    state.ledger.observe_report(report)
