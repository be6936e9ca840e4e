from collections.abc import AsyncIterator, Iterable

import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing, TopicPartition
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.lengths.buckets import Buckets
from streamrl.producers.lengths.predictor import ConstantLength, LengthPredictor, ObservedCompletion, ObservedQuantiles
from streamrl.producers.lengths.settings import LengthSettings
from streamrl.schemas.errors import BusUnavailable, DataError, DeliveryUnknown, Superseded
from streamrl.schemas.identifiers import partition_of_worker
from streamrl.schemas.reports import SkipReason, WorkerState
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import HEARTBEATS, TRAJECTORIES, WORK_ORDERS
from streamrl.schemas.trajectories import LengthEstimate, Prompt
from streamrl.settings.features import predictors
from tests.fakes.transactions import AnsweringBus
from tests.producers.dispatch.dispatcher_harness import LOOP, CountedSource, DispatcherHarness, version
from tests.progress import within

BOUND = LOOP.max_groups_in_flight
PATIENT = LOOP.model_copy(update={"heartbeat_timeout_s": 1e6})
"""A worker is never lost for its silence."""


@pytest.fixture
async def harness() -> AsyncIterator[DispatcherHarness]:
    harness = DispatcherHarness()
    yield harness
    await harness.end()


async def _started(harness: DispatcherHarness, *workers: str) -> None:
    await harness.start()
    await harness.step(0)
    for worker in workers or ("w0",):
        await harness.beat(worker)
    await harness.until(lambda: len(harness.orders()) == BOUND)


async def test_prompts_go_out_in_order_until_the_bound_is_reached(harness: DispatcherHarness) -> None:
    await _started(harness)
    await harness.settle()
    orders = harness.orders()
    assert [order.position for order in orders] == list(range(BOUND))
    assert [order.group_id for order in orders] == [f"toy/{n}/0" for n in range(BOUND)]
    first = orders[0]
    assert (first.sample_indices, first.num_generations, first.attempt) == ((0, 1), 2, 0)
    assert (first.sampling.max_completion_length, first.admitted_version) == (100, version(0))


async def test_an_order_lies_in_its_workers_lane_under_its_group(harness: DispatcherHarness) -> None:
    await _started(harness)
    records = harness.bus.log(WORK_ORDERS.full_name("r")).partitions[partition_of_worker("w0")]
    assert [record.key for record in records] == [f"toy/{n}/0" for n in range(BOUND)]


async def test_positions_alternate_between_the_shards_of_their_bucket(harness: DispatcherHarness) -> None:
    await _started(harness)
    bucket = harness.orders()[0].estimate.bucket
    assert [order.partition for order in harness.orders()] == [bucket * 2, bucket * 2 + 1] * (BOUND // 2)


async def test_a_step_opens_the_door_for_workers_that_hold_its_weights(harness: DispatcherHarness) -> None:
    await _started(harness)
    for order in harness.orders():
        await harness.finish(order)
    await harness.step(1, ["toy/0/0", "toy/1/0"])
    await harness.settle()
    assert len(harness.orders()) == BOUND
    await harness.beat(number=1)
    await harness.step(2, ["toy/2/0", "toy/3/0"])
    await harness.until(lambda: len(harness.orders()) > BOUND)
    assert harness.orders()[BOUND].admitted_version == version(1)


async def test_every_step_is_followed_by_as_many_new_groups(harness: DispatcherHarness) -> None:
    await _started(harness)
    for number in range(1, 4):
        for order in harness.orders()[-BOUND:]:
            await harness.finish(order)
        await harness.step(number, [f"toy/{2 * number - 2}/0", f"toy/{2 * number - 1}/0"])
        await harness.beat(number=number)
        await harness.until(lambda number=number: len(harness.orders()) == BOUND + 2 * number)  # type: ignore[misc]


async def test_a_group_with_a_sample_missing_holds_new_ones_back(harness: DispatcherHarness) -> None:
    await _started(harness)
    *whole, half = harness.orders()
    for order in whole:
        await harness.finish(order)
    await harness.finish(half, [0])
    await harness.step(1, ["toy/0/0", "toy/1/0"])
    await harness.beat(number=1)
    await harness.settle()
    assert len(harness.orders()) == BOUND
    await harness.finish(half, [1])
    await harness.until(lambda: len(harness.orders()) == BOUND + 2)


async def test_a_turn_that_is_over_does_not_wait_while_there_is_room() -> None:
    harness = DispatcherHarness(orders_per_turn=1, poll_s=5.0)
    await _started(harness)
    await harness.finish_run()
    await harness.end()


async def test_later_groups_have_later_time_stamps_though_the_clock_goes_back() -> None:
    time = 1_000.0
    harness = DispatcherHarness(clock=lambda: time)
    await _started(harness)
    await harness.end()
    time = 900.0
    await harness.start()
    await harness.skip("toy/0/0", 0, SkipReason.ZERO_ADVANTAGE)
    await harness.beat()
    await harness.until(lambda: len(harness.orders()) == BOUND + 1)
    stamps = [order.created_at for order in harness.orders()]
    assert stamps == sorted(set(stamps))
    await harness.end()


async def test_a_skipped_group_is_replaced_by_the_next_prompt(harness: DispatcherHarness) -> None:
    await _started(harness)
    await harness.skip("toy/1/0", 0, SkipReason.ZERO_ADVANTAGE)
    await harness.until(lambda: len(harness.orders()) == BOUND + 1)
    assert harness.orders()[-1].position == BOUND


async def test_a_worker_is_not_ordered_more_than_it_can_hold(harness: DispatcherHarness) -> None:
    await harness.start()
    await harness.step(0)
    await harness.beat(capacity=2)
    await harness.until(lambda: len(harness.orders()) == 1)
    await harness.settle()
    assert len(harness.orders()) == 1
    await harness.finish(harness.orders()[0], [0])
    await harness.until(lambda: len(harness.orders()) == 2)


async def test_the_load_is_spread_over_the_fleet(harness: DispatcherHarness) -> None:
    await harness.start()
    for worker in ("w0", "w1"):
        await harness.beat(worker)
    await harness.settle()
    await harness.step(0)
    await harness.until(lambda: len(harness.orders()) == BOUND)
    assert len(harness.orders("w0")) == len(harness.orders("w1")) == BOUND // 2


async def test_nothing_is_sent_without_a_ready_worker(harness: DispatcherHarness) -> None:
    await harness.start()
    await harness.step(0)
    for state in (WorkerState.STARTING, WorkerState.PAUSED, WorkerState.DRAINING, WorkerState.STOPPED):
        await harness.beat(f"w-{state.value}", state=state)
    await harness.settle()
    assert not harness.orders()
    await harness.beat("w0")
    await harness.until(lambda: len(harness.orders("w0")) == BOUND)


async def test_only_the_missing_samples_of_a_stopped_worker_go_to_another(harness: DispatcherHarness) -> None:
    await _started(harness)
    first, second, *_ = harness.orders("w0")
    await harness.finish(first)
    await harness.finish(second, [0])
    await harness.beat("w1")
    await harness.beat("w0", state=WorkerState.STOPPED)
    await harness.until(lambda: len(harness.orders("w1")) == BOUND - 1)
    again = {order.group_id: order for order in harness.orders("w1")}
    assert first.group_id not in again
    assert again[second.group_id] == second.replace(worker_id="w1", sample_indices=(1,), attempt=1)


async def test_a_silent_worker_loses_its_orders_when_its_lease_ends() -> None:
    time = 1_000.0
    harness = DispatcherHarness(clock=lambda: time, loop=LOOP.model_copy(update={"heartbeat_timeout_s": 5.0}))
    await _started(harness)
    for _ in range(4):  # steps that are small enough for the dispatcher not to take itself for the cause
        time += 1.0
        await harness.beat("w1")
        await harness.settle()
    assert not harness.orders("w1")
    time += 2.0
    await harness.until(lambda: len(harness.orders("w1")) == BOUND)
    await harness.end()


async def test_a_restarted_worker_gets_its_orders_again_at_once(harness: DispatcherHarness) -> None:
    await _started(harness)
    await harness.beat("w0", incarnation="b")
    await harness.until(lambda: len(harness.orders("w0")) == 2 * BOUND)
    assert {order.attempt for order in harness.orders("w0")} == {0, 1}
    await harness.beat("w0", incarnation="b")
    await harness.settle()
    assert len(harness.orders("w0")) == 2 * BOUND


async def test_lost_samples_wait_for_weights_that_keep_the_bound(harness: DispatcherHarness) -> None:
    await _started(harness)
    for order in harness.orders():
        await harness.finish(order)
    await harness.beat(number=1)
    await harness.step(1, ["toy/0/0", "toy/1/0"])
    await harness.step(2, ["toy/2/0", "toy/3/0"])
    await harness.until(lambda: len(harness.orders()) == BOUND + 2)
    await harness.beat("w1", number=0)
    await harness.beat("w0", number=1, state=WorkerState.STOPPED)
    await harness.settle()
    assert not harness.orders("w1")
    await harness.beat("w1", number=1)
    await harness.until(lambda: len(harness.orders("w1")) == 2)


async def test_a_group_that_kills_its_workers_is_given_up() -> None:
    harness = DispatcherHarness(max_attempts=3)
    dispatcher = await harness.start()
    await harness.step(0)
    for incarnation in "abcd":
        await harness.beat(incarnation=incarnation, capacity=1)
        await harness.settle()
    await harness.until(lambda: dispatcher.status().orders.given_up == 1)
    assert [(o.position, o.attempt) for o in harness.orders()][:3] == [(0, 0), (0, 1), (0, 2)]
    await harness.until(lambda: harness.orders()[-1].position == 1)
    made = [record.message() for log in harness.bus.log(TRAJECTORIES.full_name("r")).partitions for record in log]
    assert [(one.trajectory_id, one.finish_reason.value, one.attempt) for one in made] == [  # type: ignore[attr-defined]
        ("toy/0/0/0", "abort", 2),
        ("toy/0/0/1", "abort", 2),
    ]
    await harness.end()


async def test_a_resumed_dispatcher_neither_skips_nor_repeats_a_prompt(harness: DispatcherHarness) -> None:
    await _started(harness)
    await harness.end()
    harness.source.asked.clear()
    await harness.start()
    await harness.beat()
    await harness.settle()
    assert len(harness.orders()) == BOUND
    await harness.skip("toy/0/0", 0, SkipReason.GROUP_INCOMPLETE)
    await harness.until(lambda: len(harness.orders()) == BOUND + 1)
    assert harness.source.asked == [BOUND]
    assert [order.position for order in harness.orders()] == list(range(BOUND + 1))


async def test_a_resumed_trainer_holds_new_prompts_back_until_it_has_caught_up(harness: DispatcherHarness) -> None:
    await _started(harness)
    for order in harness.orders():
        await harness.finish(order)
    await harness.beat(number=2)
    await harness.step(1, ["toy/0/0", "toy/1/0"])
    await harness.step(2, ["toy/2/0", "toy/3/0"])
    await harness.until(lambda: len(harness.orders()) == 2 * BOUND)
    await harness.step(1, lineage=2)
    await harness.beat(number=1, lineage=2)
    for number in (2, 3):
        await harness.step(number, [f"toy/{2 * number - 2}/0", f"toy/{2 * number - 1}/0"], lineage=2)
        await harness.beat(number=number, lineage=2)
        await harness.settle()
        assert len(harness.orders()) == 2 * BOUND
    await harness.step(4, ["toy/6/0", "toy/7/0"], lineage=2)
    await harness.beat(number=4, lineage=2)
    await harness.until(lambda: len(harness.orders()) == 3 * BOUND)


async def test_a_pause_holds_orders_back_until_the_run_goes_on(harness: DispatcherHarness) -> None:
    await harness.flow("pause")
    await harness.start()
    await harness.step(0)
    await harness.beat()
    await harness.settle()
    assert not harness.orders()
    await harness.flow("run")
    await harness.until(lambda: len(harness.orders()) == BOUND)


async def test_a_drained_run_ends_the_loop_when_the_workers_owe_nothing(harness: DispatcherHarness) -> None:
    await _started(harness)
    await harness.flow("drain")
    await harness.skip("toy/0/0", 0, SkipReason.ZERO_ADVANTAGE)
    await harness.settle()
    assert harness.task is not None
    assert not harness.task.done()
    for order in harness.orders():
        await harness.finish(order)
    await within(harness.task, 3)
    assert len(harness.orders()) == BOUND


async def test_the_end_of_the_run_ends_the_loop(harness: DispatcherHarness) -> None:
    await _started(harness)
    await harness.finish_run()
    assert harness.task is not None
    await within(harness.task, 3)


async def test_the_dispatcher_ignores_records_that_do_not_decode(harness: DispatcherHarness) -> None:
    publisher = await harness.bus.publisher("test")
    for topic in ("r.trajectories", "r.heartbeats", "r.steps", "r.skips", "r.control"):
        await publisher.publish(Outgoing(topic, b"\xff", "key", 0))
    await _started(harness)


async def test_orders_of_unknown_fate_are_sent_again_before_the_next() -> None:
    every_other: list[Exception | None] = [DeliveryUnknown("no answer"), None] * 10
    harness = DispatcherHarness(bus=AnsweringBus(answers=every_other, arrives=True), orders_per_turn=2)
    await harness.start()
    await harness.step(0)
    await harness.beat()
    await harness.until(lambda: len(harness.orders()) == 2 * BOUND)
    records = harness.bus.log(WORK_ORDERS.full_name("r")).partitions[partition_of_worker("w0")]
    assert [record.key for record in records] == [f"toy/{n}/0" for n in (0, 1, 0, 1, 2, 3, 2, 3)]
    await harness.end()


class _HeavyColumns(CountedSource):
    """Short questions with two kilobytes of columns, in characters of two bytes each."""

    def prompt_at(self, position: int) -> tuple[Prompt, int]:
        prompt, data_pass = super().prompt_at(position)
        return prompt.model_copy(update={"columns": {"reference": "é" * 1000}}), data_pass


async def test_a_turn_ends_once_its_orders_weigh_enough_columns_included(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.producers.dispatch.dispatcher.TURN_BYTES", 4000)
    loop = LOOP.model_copy(update={"groups_per_step": 8})
    harness = DispatcherHarness(loop=loop, bus=(bus := AnsweringBus()), source=_HeavyColumns())
    await harness.start()
    await harness.step(0)
    await harness.beat()
    await harness.until(lambda: len(harness.orders()) == loop.max_groups_in_flight)
    await harness.end()
    assert set(bus.commits) == {2}


async def test_only_the_newest_dispatcher_sends_orders() -> None:
    """The first one stands still while another takes over; when it goes on it ends and has ordered nothing more."""
    first, second = DispatcherHarness(), DispatcherHarness()
    second.bus = first.bus
    await _started(first)
    await second.start()
    await second.settle()
    for order in first.orders():
        await second.finish(order)
    await second.step(1, ["toy/0/0", "toy/1/0"])
    await second.beat(number=1)
    assert first.task is not None
    with pytest.raises(Superseded):
        await within(first.task, 3)
    await second.until(lambda: len(second.orders()) == BOUND + 2)
    assert [order.position for order in second.orders()] == list(range(BOUND + 2))
    await second.end()


async def test_an_order_that_a_worker_swallows_goes_to_another_after_its_time() -> None:
    """The worker beats, and is busy with something else."""
    time = 1_000.0
    harness = DispatcherHarness(clock=lambda: time, loop=PATIENT, settings=DispatchSettings(order_timeout_s=60.0))
    await _started(harness)
    whole, half, *_ = harness.orders()
    await harness.finish(whole)
    time += 40.0
    await harness.beat()
    await harness.finish(half, [0])
    await harness.beat("w1")
    await harness.settle()
    assert harness.orders("w1") == []
    time += 30.0
    await harness.beat()
    await harness.until(lambda: len(harness.orders("w1")) == BOUND - 2)
    assert {whole.group_id, half.group_id}.isdisjoint(order.group_id for order in harness.orders("w1"))
    time += 35.0
    await harness.beat("w0")
    await harness.beat("w1")
    await harness.until(lambda: len(harness.orders("w1")) == BOUND - 1)
    assert harness.orders("w1")[0].sample_indices == (1,)
    await harness.end()


async def test_the_only_worker_gets_what_it_swallowed_again_with_growing_patience() -> None:
    time = 1_000.0
    harness = DispatcherHarness(clock=lambda: time, loop=PATIENT, settings=DispatchSettings(order_timeout_s=10.0))
    await _started(harness)
    for wait, attempts in ((11.0, 2), (11.0, 2), (10.0, 3)):
        time += wait
        await harness.beat()
        await harness.until(lambda attempts=attempts: len(harness.orders()) == attempts * BOUND)  # type: ignore[misc]
        await harness.settle()
        assert len(harness.orders()) == attempts * BOUND
    await harness.end()


async def test_admission_continues_after_orders_that_were_never_carried_out() -> None:
    time = 1_000.0
    settings = DispatchSettings(order_timeout_s=10.0)
    harness = DispatcherHarness(clock=lambda: time, loop=PATIENT, settings=settings, max_attempts=2)
    dispatcher = await harness.start()
    await harness.step(0)
    await harness.beat()
    await harness.until(lambda: len(harness.orders()) == BOUND)
    for _ in range(2):
        time += 21.0
        await harness.beat()
        await harness.settle()
    await harness.until(lambda: dispatcher.status().orders.given_up == BOUND)
    for number in range(BOUND):
        for sample in range(LOOP.num_generations):
            await harness.skip(f"toy/{number}/0", sample, SkipReason.POISON)
    await harness.until(lambda: harness.orders()[-1].position == 2 * BOUND - 1)
    await harness.end()


async def test_a_broker_that_is_silent_costs_no_worker_its_orders() -> None:
    time, down = 1_000.0, False

    class Bus(MemoryBus):
        async def subscribe(self, *topics, **named):  # type: ignore[no-untyped-def]
            subscription = await super().subscribe(*topics, **named)
            ends = subscription.end_offsets

            async def asked(partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
                if down:
                    raise BusUnavailable("gone")
                return await ends(partitions)

            subscription.end_offsets = asked  # type: ignore[method-assign]
            return subscription

    harness = DispatcherHarness(
        bus=Bus(), clock=lambda: time, loop=LOOP.model_copy(update={"heartbeat_timeout_s": 8.0})
    )
    await _started(harness)
    await harness.settle()
    down = True
    for _ in range(30):  # steps that are small enough for the dispatcher not to take itself for the cause
        time += 1.0
        await harness.settle()
    down = False
    for _ in range(3):  # lost workers are looked for as time goes on, and w1 is one that could get their orders
        time += 1.0
        await harness.beat("w1")
        await harness.settle()
    assert not harness.orders("w1")
    for _ in range(20):  # small steps: of a large one a dispatcher that is busy just then takes itself for the cause
        time += 1.0
        await harness.beat("w1")
        await harness.settle()
        if len(harness.orders("w1")) == BOUND:
            break
    assert len(harness.orders("w1")) == BOUND
    await harness.end()


async def test_a_dead_worker_is_noticed_within_ten_seconds() -> None:
    """With the default settings: from its last heartbeat to the orders for another."""
    time = 1_000.0
    loop = LOOP.model_copy(update={"heartbeat_timeout_s": LoopSettings().heartbeat_timeout_s})
    harness = DispatcherHarness(clock=lambda: time, loop=loop)
    await _started(harness)
    for _ in range(9):
        time += 1.0
        await harness.beat("w1")
        await harness.settle()
    await harness.until(lambda: len(harness.orders("w1")) == BOUND)
    await harness.end()


async def test_orders_carry_the_seed_of_the_run(harness: DispatcherHarness) -> None:
    harness.seed = 7
    await _started(harness)
    assert {order.sampling.seed for order in harness.orders()} == {7}


class _Wild:
    """Always wrong, in a different way each time."""

    buckets = Buckets(LOOP.bucket_boundaries)

    learns_from_the_past = False

    def __init__(self) -> None:
        self.calls = 0

    def predict(self, prompt: Prompt, group_id: str = "") -> LengthEstimate:
        self.calls += 1
        length = 1 if self.calls % 2 else 10**9
        return LengthEstimate(median=length, upper=length, bucket=self.calls % 4, predictor="wild")

    def observe(self, completion: ObservedCompletion) -> None:
        """Nothing to learn."""


LEARNED = tuple(
    made(LengthSettings(predictor="learned"), LOOP, Buckets(LOOP.bucket_boundaries))
    for name, made in predictors().items()
    if name == "learned"
)
"""The learned predictor, where the tree has it."""


@pytest.mark.parametrize(
    "predictor",
    [
        ConstantLength(LOOP),
        ObservedQuantiles(LOOP, min_observations=1),
        *LEARNED,
        _Wild(),
    ],
)
@pytest.mark.parametrize("strategy", ["least_loaded", "round_robin", "lpt", "skewness_aware"])
async def test_estimates_are_advice_only(predictor: LengthPredictor, strategy: str) -> None:
    """Whatever is predicted, the same prompts go out, each sample once, and all of a window before any later one."""
    harness = DispatcherHarness(predictor=predictor, settings=DispatchSettings(strategy=strategy))
    await harness.beat("w1")
    await _started(harness)
    for number in range(2, 8, 2):
        for order in harness.orders()[-BOUND:]:
            await harness.finish(order)
        for worker in ("w0", "w1"):
            await harness.beat(worker, number=number)
        for step in (number - 1, number):
            await harness.step(step, [f"toy/{2 * step - 2}/0", f"toy/{2 * step - 1}/0"])
        await harness.until(lambda number=number: len(harness.orders()) == BOUND + 2 * number)  # type: ignore[misc]
    assert [order.position for order in harness.orders()] == list(range(4 * BOUND))
    assert {order.attempt for order in harness.orders()} == {0}
    await harness.end()


async def test_a_source_that_fails_ends_the_loop_with_its_error(harness: DispatcherHarness) -> None:
    def fails(position: int) -> tuple[Prompt, int]:
        raise DataError("expected a prompt, got none")

    harness.source.prompt_at = fails  # type: ignore[method-assign]
    await harness.start()
    await harness.step(0)
    await harness.beat()
    assert harness.task is not None
    with pytest.raises(DataError):
        await within(harness.task, 3)
    harness.task = None


async def test_the_status_shows_what_is_under_way(harness: DispatcherHarness) -> None:
    dispatcher = await harness.start()
    await harness.step(0)
    await harness.beat()
    await harness.until(lambda: len(harness.orders()) == BOUND)
    await harness.finish(harness.orders()[0])
    await harness.until(lambda: dispatcher.status().lengths.observations == 2)
    status = dispatcher.status()
    orders = status.orders
    assert (status.cursor, orders.admitted, orders.in_flight, orders.missing) == (BOUND, BOUND, BOUND, 2 * BOUND - 2)
    assert (status.workers_ready, status.version, status.mode) == (1, version(0), "run")
    assert (status.lengths.coverage, sum(status.lengths.predicted), sum(status.lengths.actual)) == (1.0, 2, 2)
    assert len(harness.bus.log(HEARTBEATS.full_name("r")).partitions[0]) == 1


class _ByPosition:
    """The later of two prompts is the longer."""

    buckets = Buckets(LOOP.bucket_boundaries)

    learns_from_the_past = False

    def predict(self, prompt: Prompt, group_id: str = "") -> LengthEstimate:
        length = 10 + int(prompt.prompt_id.rpartition("/")[2])
        return LengthEstimate(median=length, upper=length, bucket=0, predictor="test")

    def observe(self, completion: ObservedCompletion) -> None:
        """Nothing to learn."""


async def test_every_drawn_prompt_is_ordered() -> None:
    """The longest of a window goes first; the dispatcher ends before the others, and the next one sends them first."""
    harness = DispatcherHarness(predictor=_ByPosition(), settings=DispatchSettings(strategy="lpt"))
    await harness.start()
    await harness.step(0)
    await harness.beat(capacity=2)
    await harness.until(lambda: [order.position for order in harness.orders()] == [1])
    await harness.end()
    await harness.start()
    await harness.beat(capacity=100)
    await harness.until(lambda: len(harness.orders()) == BOUND)
    records = harness.bus.log(WORK_ORDERS.full_name("r")).partitions[partition_of_worker("w0")]
    assert [record.key for record in records] == [f"toy/{n}/0" for n in (1, 0, 3, 2)]
    await harness.end()


async def test_a_trajectory_frees_its_slot_in_the_same_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.producers.dispatch.scheduler.OVERCOMMIT", 1.0)
    harness = DispatcherHarness(poll_s=5.0)
    await harness.start()
    await harness.step(0)
    await harness.beat(capacity=2)
    await harness.until(lambda: len(harness.orders()) == 1)
    for number in range(1, BOUND):
        await harness.finish(harness.orders()[-1])
        await harness.until(lambda number=number: len(harness.orders()) == number + 1, timeout_s=2.0)  # type: ignore[misc]
    await harness.finish_run()
    await harness.end()


async def test_a_large_window_is_planned_and_sent_whole() -> None:
    loop = LOOP.model_copy(update={"groups_per_step": 300, "num_generations": 1, "mode": "synchronous"})
    harness = DispatcherHarness(loop=loop, settings=DispatchSettings(strategy="skewness_aware"))
    dispatcher = await harness.start()
    await harness.beat("w0")
    await harness.beat("w1")
    await harness.settle()
    await harness.step(0)
    await harness.until(lambda: len(harness.orders()) == 250)
    for order in harness.orders():
        await harness.finish(order)
    await harness.until(lambda: len(harness.orders()) == 300)
    for order in harness.orders()[-60:]:
        await harness.finish(order)
    await harness.until(lambda: dispatcher.status().plan.actual_s is not None)
    status = dispatcher.status()
    assert (status.plan.unsent, status.cursor, len(status.plan.queues)) == (0, 300, 2)
    assert status.fields()["queues"] == {"w0": 0, "w1": 0}
    await harness.end()
