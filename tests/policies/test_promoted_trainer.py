"""A dispatcher that starts again after another policy was promoted: its own trainer says what is under way."""

import time
from functools import partial

from streamrl.bus.port import TopicPartition
from streamrl.policies.dispatching import SeveralPolicyDispatch
from streamrl.producers.dispatch.recovery import rebuild
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.dispatch.state import DispatchState
from streamrl.producers.lengths.predictor import ConstantLength
from streamrl.schemas.control import Promotion, RunFinished, WeightsReady
from streamrl.schemas.identifiers import PolicyVersion, scope_of
from streamrl.schemas.reports import SkipReason
from streamrl.schemas.topics import CONTROL, SKIPS, STEPS, WORK_ORDERS
from tests.fakes.topics import send
from tests.producers.dispatch.dispatcher_harness import (
    LOOP,
    DispatcherHarness,
    order,
    skip_record,
    step_report,
    version,
)


async def test_served_numbers_continue_and_a_promoted_policys_own_steps_and_rows_decide_what_is_under_way() -> None:
    """The run's own trainer is at 40 and has ended all; the promoted one took 2 steps, and never read one group."""
    harness = DispatcherHarness()
    own = scope_of("r", "rloo")
    for topic in (STEPS, SKIPS):
        harness.bus.create_topic(topic.full_name(own), 1)
    sent = [order(f"toy/{position}/0").replace(admitted_version=version(39)) for position in range(4)]
    for each in sent:
        await harness.send(WORK_ORDERS, each, each.group_id, each.position)
    before, ended, after, left = [each.group_id for each in sent]
    await harness.step(40, [before, ended, after, left])
    await harness.finish(order(before))
    say = partial(send, harness.bus, own, key="rloo")
    row = skip_record(before, 0, SkipReason.BEFORE_ATTACH).replace(
        group_id=None, trajectory_id=None, partition=order(before).partition, offset=0, end_offset=2, policy="rloo"
    )
    await say(SKIPS, row.replace(lineage=1, sequence=1))
    await say(STEPS, step_report(1, []).replace(policy="rloo"))
    await say(STEPS, step_report(2, [ended]).replace(policy="rloo"))
    first = step_report(2, [], parent=version(2), parent_skips=1)
    await say(STEPS, first.replace(version=PolicyVersion(5, 2), served_as=PolicyVersion(5, 41)))
    await harness.finish(order(after), [0])
    promotion = Promotion(policy="rloo", since=version(40), lineage=5, shift=39)
    served = WeightsReady(
        sequence=9, sent_at=0.0, version=PolicyVersion(5, 41), step=2, manifest_sha256="0" * 64, relays=()
    )
    await harness.send(CONTROL, served.replace(promotion=promotion), "weights/policy", 0)
    lengths = ConstantLength(LOOP)
    state = DispatchState(LOOP, DispatchSettings(), lengths, policies=SeveralPolicyDispatch())
    positions = await rebuild(harness.bus, "r", state, time.time)
    assert [name for name in (before, ended, after, left) if state.ledger.is_in_flight(name)] == [after, left]
    assert state.ledger.current == (5, 41)
    assert TopicPartition(STEPS.full_name(own), 0) in positions
    # Live, in the same numbers; and its last step, in its own, is the run's.
    state.observe(step_report(3, [after]).replace(version=PolicyVersion(5, 3)), time.time())
    assert (state.ledger.current, state.ledger.is_in_flight(after)) == ((5, 42), False)
    state.observe(RunFinished(sequence=10, sent_at=0.0, step=3), time.time())
    assert state.finished
    assert not state.has_other_trainer
    state.observe(served.replace(promotion=None), time.time())
    assert state.has_other_trainer
