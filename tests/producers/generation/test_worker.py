import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from streamrl.bus.port import Outgoing
from streamrl.producers.rewards.runner import RewardRunner
from streamrl.producers.rewards.settings import RewardSettings
from streamrl.schemas.codec import MAX_TEXT_BYTES
from streamrl.schemas.control import (
    Control,
    DrainWorker,
    FlowControl,
    RunFinished,
)
from streamrl.schemas.errors import BusUnavailable, DeliveryUnknown, EngineError, ModelError, RewardLoadError
from streamrl.schemas.identifiers import PolicyVersion, partition_of_worker
from streamrl.schemas.reports import WorkerState
from streamrl.schemas.topics import (
    TOKENS,
    TRAJECTORIES,
    UNGRADED,
    WORK_ORDERS,
)
from streamrl.schemas.trajectories import (
    ChatTurn,
    FinishReason,
    Prompt,
    TokenChunk,
    UngradedTrajectory,
)
from tests.fakes.engine import FakeEngine, FakeTokenizer
from tests.fakes.publisher import FailingBus
from tests.fakes.scorer import FakeScorer, SlowScorer
from tests.fakes.waiting import until
from tests.producers.generation.factories import WORKER, work_order
from tests.producers.generation.worker_harness import RUN, V0, V1, MakeWorker, is_about
from tests.progress import within


async def test_an_order_becomes_one_trajectory_per_sample_on_its_partition(make_worker: MakeWorker) -> None:
    it = make_worker()
    await it.ready()
    await it.order(work_order(0, samples=3))
    await it.order(work_order(1, samples=3, sample_indices=(2,), attempt=1))
    await until(lambda: len(it.trajectories) == 4)
    records = it.bus.log(TRAJECTORIES.full_name(RUN)).partitions[3]
    assert sorted(trajectory.trajectory_id for trajectory in it.trajectories) == [
        "d/0/0/0",
        "d/0/0/1",
        "d/0/0/2",
        "d/1/0/2",
    ]
    assert {record.key for record in records} == {"d/0/0", "d/1/0"}
    assert all(trajectory.rewards == {"length": 8.0} for trajectory in it.trajectories)
    await until(lambda: it.heartbeats[-1].finished_trajectories == 4)
    assert it.heartbeats[-1].generated_tokens == 32


async def test_weights_that_are_announced_again_are_fetched_where_they_are_now(make_worker: MakeWorker) -> None:
    it = make_worker()
    ready = it.relay.add(V0)
    await it.control(ready.replace(relays=("http://127.0.0.1:1",)))
    running = it.start()
    await until(lambda: bool(it.heartbeats))
    await it.control(ready)
    await until(lambda: it.state is WorkerState.READY or running.done())
    assert it.engine.version == V0


@pytest.mark.parametrize("partials", ["off", "durable"])
async def test_weights_that_wait_until_nothing_is_sampled_wait_for_no_reward(
    make_worker: MakeWorker, partials: str
) -> None:
    it = make_worker(settings={"adopt": "idle", "partial_trajectories": partials}, rewards=SlowScorer())
    it.engine.hold_at = 4
    await it.ready()
    await it.order(work_order(0, samples=2))
    await until(lambda: it.engine.sampled == 8)
    await it.control(it.relay.add(V1))
    await until(lambda: it.heartbeats[-1].awaits == V1)
    await asyncio.sleep(0.3)
    assert it.engine.version == V0
    it.engine.release.set()
    await until(lambda: it.engine.version == V1)
    assert it.trajectories == []
    it.rewards.may_answer.set()
    await until(lambda: len(it.trajectories) == 2)
    assert {one.newest_version for one in it.trajectories} == {V0}


async def test_graded_samples_go_to_graders_with_prompts_on_the_same_partition(make_worker: MakeWorker) -> None:
    it = make_worker(has_graders=True)
    await it.ready()
    order = work_order(0, samples=3)
    await it.order(order)
    await until(lambda: len(it.read(UNGRADED)) == 3)
    assert it.trajectories == []
    assert len(it.bus.log(UNGRADED.full_name(RUN)).partitions[order.partition]) == 3
    for message in it.read(UNGRADED):
        assert isinstance(message, UngradedTrajectory)
        assert (message.prompt, message.rewards) == (order.prompt, {"length": 8.0})


async def test_a_sample_without_a_completion_skips_the_graders(make_worker: MakeWorker) -> None:
    it = make_worker(has_graders=True)
    await it.ready()
    await it.order(work_order(0, samples=1, prompt=Prompt(prompt_id="d/0", dataset="d", content="x" * 100)))
    await until(lambda: len(it.trajectories) == 1)
    assert it.trajectories[0].finish_reason is FinishReason.ABORT
    assert it.read(UNGRADED) == []


async def test_no_order_is_missed(make_worker: MakeWorker) -> None:
    """Orders before the worker are for an earlier incarnation; every one after its first heartbeat counts."""
    it = make_worker(engine=FakeEngine(start_delay_s=0.1))
    await it.order(work_order(0, samples=1))
    it.start()
    await until(lambda: it.heartbeats)
    assert it.state is WorkerState.STARTING
    await it.order(work_order(1, samples=1))
    await it.control(it.relay.add(V0))
    await until(lambda: it.trajectories)
    await asyncio.sleep(0.05)
    assert [trajectory.group_id for trajectory in it.trajectories] == ["d/1/0"]


async def test_orders_for_others_and_records_that_are_no_orders_are_passed_over(make_worker: MakeWorker) -> None:
    it = make_worker()
    await it.ready()
    await it.order(work_order(0, worker_id="another"))
    publisher = await it.bus.publisher("test")
    topic = WORK_ORDERS.full_name(RUN)
    for value in (b"garbage", None):
        await publisher.publish(Outgoing(topic, value, "k", partition_of_worker(WORKER), (("schema", b"work-order"),)))
    await it.order(work_order(1, samples=1))
    await until(lambda: it.trajectories)
    assert [trajectory.group_id for trajectory in it.trajectories] == ["d/1/0"]


async def test_a_sample_running_is_not_started_twice(make_worker: MakeWorker) -> None:
    it = make_worker(engine=FakeEngine(hold_at=0))
    await it.ready()
    await it.order(work_order(0, samples=2))
    await it.order(work_order(0, samples=3, attempt=1))
    await until(lambda: len(it.engine.requests) == 3)
    it.engine.release.set()
    await until(lambda: len(it.trajectories) == 3)
    assert len({trajectory.trajectory_id for trajectory in it.trajectories}) == 3


async def test_waiting_weights_are_reported_and_a_completion_has_one_version(
    make_worker: MakeWorker,
) -> None:
    it = make_worker(engine=FakeEngine(hold_at=4), settings={"heartbeat_interval_s": 30, "adopt": "idle"})
    await it.ready()
    assert it.engine.version == V0  # with nothing in the engine, the first ones wait for nothing
    await it.order(work_order(0, samples=2))
    await until(lambda: it.engine.running == 2)
    await it.control(it.relay.add(V1))
    await until(lambda: it.heartbeats[-1].awaits == V1)
    assert (it.engine.version, it.heartbeats[-1].version) == (V0, V0)
    newer = PolicyVersion(1, 2)
    await it.control(it.relay.add(newer))
    it.engine.release.set()
    await until(lambda: it.heartbeats[-1].version == newer and it.heartbeats[-1].awaits is None)
    assert [version for version, _ in it.engine.adopted] == [V0, newer]  # the one between is not loaded
    assert [[span.version for span in one.version_spans] for one in it.trajectories] == [[V0], [V0]]


class SlowToAdopt(FakeEngine):
    """Takes its second weights and all later ones only once ``may_adopt`` is set."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.may_adopt, self.asked_to_adopt = asyncio.Event(), 0

    async def adopt(self, directory: Path, version: PolicyVersion) -> None:
        self.asked_to_adopt += 1
        if self.version is not None:
            await self.may_adopt.wait()
        await super().adopt(directory, version)


async def test_orders_received_while_an_idle_engine_loads_run_with_the_new_weights(make_worker: MakeWorker) -> None:
    """The order was on its way when the dispatcher heard that none is wanted."""
    engine = SlowToAdopt()
    it = make_worker(engine=engine, settings={"adopt": "idle"})
    await it.ready()
    await it.control(it.relay.add(V1))
    await until(lambda: engine.asked_to_adopt == 2)
    await it.order(work_order(0, samples=2))
    await asyncio.sleep(0.1)
    assert engine.requests == []
    engine.may_adopt.set()
    await until(lambda: len(it.trajectories) == 2)
    assert {span.version for one in it.trajectories for span in one.version_spans} == {V1}


async def test_weights_adopted_within_a_completion_begin_a_new_span(
    make_worker: MakeWorker,
) -> None:
    it = make_worker(engine=FakeEngine(hold_at=4), settings={"heartbeat_interval_s": 30})
    await it.ready()
    await it.order(work_order(0, samples=1))
    await until(lambda: it.engine.running == 1)
    await it.control(it.relay.add(V1))
    await until(lambda: it.heartbeats[-1].version == V1)
    it.engine.release.set()
    await until(lambda: it.trajectories)
    spans = it.trajectories[0].version_spans
    assert [(span.version, span.start, span.end) for span in spans] == [(V0, 0, 4), (V1, 4, 8)]


async def test_a_late_joiner_takes_only_the_newest_weights(make_worker: MakeWorker) -> None:
    it = make_worker()
    for number in range(5):
        await it.control(it.relay.add(PolicyVersion(1, number)))
    it.start()
    await until(lambda: it.state is WorkerState.READY)
    assert [version for version, _ in it.engine.adopted] == [(1, 4)]


@pytest.mark.parametrize("content", ["much too long for sixteen tokens", "", (ChatTurn(role="user", content="hi"),)])
async def test_a_prompt_that_cannot_be_sampled_is_accounted_for(make_worker: MakeWorker, content: Any) -> None:
    it = make_worker()
    await it.ready()
    await it.order(work_order(0, samples=2, prompt=Prompt(prompt_id="d/0", dataset="d", content=content)))
    await until(lambda: len(it.trajectories) == 2)
    for trajectory in it.trajectories:
        assert trajectory.finish_reason is FinishReason.ABORT
        assert trajectory.rewards == {"length": None}
        assert trajectory.refusal
        assert trajectory.reward_errors["length"].startswith("expected a prompt")
    assert it.engine.requests == []


async def test_a_trajectory_too_large_to_send_is_accounted_for(make_worker: MakeWorker) -> None:
    class Verbose(FakeTokenizer):
        def decode(self, token_ids: Sequence[int]) -> str:
            return "x" * (MAX_TEXT_BYTES + 1)

    it = make_worker(tokenizer=Verbose())
    await it.ready()
    await it.order(work_order(0, samples=1))
    await until(lambda: it.trajectories)
    assert it.trajectories[0].finish_reason is FinishReason.ABORT
    assert f"at most {MAX_TEXT_BYTES} bytes of text" in it.trajectories[0].reward_errors["length"]


async def test_nothing_new_starts_while_paused_and_what_runs_goes_on(make_worker: MakeWorker) -> None:
    it = make_worker(engine=FakeEngine(hold_at=4))
    await it.ready()
    await it.order(work_order(0, samples=1))
    await until(lambda: it.engine.running == 1)
    await it.control(FlowControl(sequence=1, sent_at=0.0, mode="pause"))
    await until(lambda: it.state is WorkerState.PAUSED)
    await it.order(work_order(1, samples=1))
    it.engine.release.set()
    await until(lambda: len(it.trajectories) == 1)
    await asyncio.sleep(0.1)
    assert len(it.engine.requests) == 1
    await it.control(FlowControl(sequence=2, sent_at=0.0, mode="run"))
    await until(lambda: len(it.trajectories) == 2)
    assert it.state is WorkerState.READY


@pytest.mark.parametrize(
    "message",
    [FlowControl(sequence=1, sent_at=0.0, mode="drain"), DrainWorker(sequence=1, sent_at=0.0, worker_id=WORKER)],
)
async def test_a_drained_worker_finishes_what_it_holds_and_leaves(make_worker: MakeWorker, message: Control) -> None:
    it = make_worker(engine=FakeEngine(hold_at=4))
    running = await it.ready()
    await it.order(work_order(0))
    await until(lambda: it.engine.running == 2)
    await it.control(message)
    await until(lambda: it.state is WorkerState.DRAINING)
    await it.order(work_order(1))
    it.engine.release.set()
    await within(running, 5)
    assert [trajectory.group_id for trajectory in it.trajectories] == ["d/0/0"] * 2
    assert it.state is WorkerState.STOPPED
    assert it.engine.closed
    assert it.rewards.closed


async def test_an_order_to_drain_that_was_meant_for_an_earlier_incarnation_or_another_worker_is_ignored(
    make_worker: MakeWorker,
) -> None:
    it = make_worker()
    await it.control(DrainWorker(sequence=1, sent_at=9e9, worker_id=WORKER))
    running = await it.ready()
    await it.control(DrainWorker(sequence=2, sent_at=9e9, worker_id="another"))
    await it.order(work_order(0, samples=1))
    await until(lambda: it.trajectories)
    assert not running.done()


async def test_the_end_of_the_run_ends_the_worker_without_waiting_for_completions(make_worker: MakeWorker) -> None:
    it = make_worker(engine=FakeEngine(hold_at=4))
    running = await it.ready()
    await it.order(work_order(0))
    await until(lambda: it.engine.running == 2)
    await it.control(RunFinished(sequence=1, step=9, sent_at=0.0))
    await within(running, 5)
    assert (it.trajectories, it.engine.left_early, it.state) == ([], 2, WorkerState.STOPPED)


async def test_a_worker_that_is_asked_to_leave_abandons_nothing_before_the_run_is_finished(
    make_worker: MakeWorker,
) -> None:
    """However long it takes, and however often it is asked: as when the machine stands still meanwhile."""
    it = make_worker(engine=FakeEngine(hold_at=4), settings={"drain_grace_s": 0.0})
    running = await it.ready()
    await it.order(work_order(0))
    await until(lambda: it.engine.running == 2)
    with capture_logs() as logs:
        for sequence in (1, 2):
            await it.control(DrainWorker(sequence=sequence, sent_at=0.0, worker_id=WORKER))
        await until(lambda: it.state is WorkerState.DRAINING)
        await asyncio.sleep(0.7)  # it looks whether anything changed twice a second
        assert not running.done()
        await it.control(RunFinished(sequence=3, step=9, sent_at=0.0))
        await within(running, 5)
    told = [(log["count"], log["reason"]) for log in logs if "abandoned" in log["event"]]
    assert told == [(2, "the run is finished")]


async def test_the_end_of_an_earlier_life_of_the_run_does_not_end_its_continuation(make_worker: MakeWorker) -> None:
    it = make_worker()
    await it.control(it.relay.add(V0))
    await it.control(RunFinished(sequence=1, step=0, sent_at=0.0))
    running = it.start()
    await until(lambda: it.state is WorkerState.READY)
    await it.control(it.relay.add(PolicyVersion(2, 3)))
    await it.order(work_order(0, samples=1))
    await until(lambda: it.trajectories)
    await it.control(RunFinished(sequence=2, step=2, sent_at=0.0))
    await asyncio.sleep(0.05)
    assert not running.done()
    await it.control(RunFinished(sequence=3, step=3, sent_at=0.0))
    await within(running, 5)
    assert it.state is WorkerState.STOPPED


async def test_only_completions_that_end_within_the_grace_period_are_published(make_worker: MakeWorker) -> None:
    it = make_worker(engine=FakeEngine(hold_at=4, max_num_seqs=1), settings={"drain_grace_s": 0.3})
    running = await it.ready()
    await it.order(work_order(0, samples=2))
    await until(lambda: it.engine.running == 1)
    it.stop.set()
    await until(lambda: it.state is WorkerState.DRAINING)
    it.engine.release.set()
    it.engine.hold_at, it.engine.release = 0, asyncio.Event()
    await within(running, 5)
    assert [trajectory.sample_index for trajectory in it.trajectories] == [0]
    assert it.state is WorkerState.STOPPED
    assert it.engine.closed


async def test_a_stop_while_the_engine_loads_is_obeyed(make_worker: MakeWorker) -> None:
    it = make_worker(engine=FakeEngine(start_delay_s=60))
    running = it.start()
    await until(lambda: it.heartbeats)
    it.stop.set()
    await within(running, 5)
    assert it.state is WorkerState.STOPPED


async def test_a_trajectory_of_unknown_fate_is_sent_again_under_the_same_id(make_worker: MakeWorker) -> None:
    failures = [DeliveryUnknown("late"), DeliveryUnknown("late")]
    about = is_about(TRAJECTORIES)
    bus = FailingBus(fail=lambda record: failures.pop() if about(record) and failures else None, arrives=about)
    it = make_worker(bus=bus)
    await it.ready()
    await it.order(work_order(0, samples=1))
    await until(lambda: len(it.trajectories) == 3)
    assert {trajectory.trajectory_id for trajectory in it.trajectories} == {"d/0/0/0"}
    assert len(it.engine.requests) == 1
    await until(lambda: it.heartbeats[-1].finished_trajectories == 1)


async def test_no_new_work_starts_while_the_broker_is_down(make_worker: MakeWorker) -> None:
    down, about = [True], is_about(TRAJECTORIES)
    bus = FailingBus(fail=lambda record: BusUnavailable("gone") if about(record) and down else None)
    it = make_worker(bus=bus, settings={"max_undelivered": 2})
    await it.ready()
    await it.order(work_order(0, samples=2))
    await until(lambda: it.state is WorkerState.PAUSED)
    await it.order(work_order(1, samples=1))
    await asyncio.sleep(0.2)
    assert len(it.engine.requests) == 2
    down.clear()
    await until(lambda: len(it.trajectories) == 3)


async def test_an_engine_that_fails_twice_ends_the_worker_with_the_error(make_worker: MakeWorker) -> None:
    it = make_worker(engine=FakeEngine(failures={"d/0/0/0": 2}))
    running = await it.ready()
    await it.order(work_order(0))
    with pytest.raises(EngineError, match="fake failure"):
        await within(running, 5)
    assert it.state is WorkerState.STOPPED
    assert it.engine.closed


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"engine": FakeEngine(start_error=ModelError("no model"))}, ModelError),
        ({"rewards": FakeScorer(start_error=RewardLoadError("no function"))}, RewardLoadError),
    ],
)
async def test_what_cannot_be_loaded_is_raised_as_it_is(
    make_worker: MakeWorker, changes: dict[str, Any], error: type[Exception]
) -> None:
    it = make_worker(**changes)
    with pytest.raises(error):
        await within(it.start(), 5)
    assert it.engine.closed
    assert it.rewards.closed


async def test_tokens_are_streamed_if_wanted(make_worker: MakeWorker) -> None:
    it = make_worker(settings={"partial_trajectories": "stream"})
    await it.ready()
    await it.order(work_order(0, samples=2))
    await until(lambda: len(it.trajectories) == 2 and len(it.read(TOKENS)) == 4)
    chunks = [message for message in it.read(TOKENS) if isinstance(message, TokenChunk)]
    for trajectory in it.trajectories:
        mine = [chunk for chunk in chunks if chunk.trajectory_id == trajectory.trajectory_id]
        assert [chunk.start for chunk in mine] == [0, 4]
        assert [chunk.finish_reason for chunk in mine] == [None, FinishReason.STOP]
        assert [token for chunk in mine for token in chunk.token_ids] == trajectory.token_ids.tolist()


@pytest.mark.processes
async def test_a_failing_reward_function_is_named_in_its_trajectory_and_others_are_scored(
    make_worker: MakeWorker,
) -> None:
    here = "tests.producers.generation.reward_functions"
    settings = RewardSettings(functions=(f"{here}:length", f"{here}:by_sample"), timeout_s=0.5)
    it = make_worker(rewards=RewardRunner(settings))
    await it.ready()
    await it.order(work_order(0, samples=4))
    await until(lambda: len(it.trajectories) == 4)
    by_index = {trajectory.sample_index: trajectory for trajectory in it.trajectories}
    assert [by_index[index].rewards for index in range(4)] == [
        {"length": 8.0, "by_sample": 1.0},
        {"length": 8.0, "by_sample": None},
        {"length": 8.0, "by_sample": None},
        {"length": 8.0, "by_sample": 1.0},
    ]
    assert [by_index[index].reward_errors for index in range(4)] == [
        {},
        {"by_sample": "timed out after 0.5 s"},
        {"by_sample": "ValueError: third"},
        {},
    ]
