import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Bus, Outgoing, Record, Subscription, TopicPartition
from streamrl.observability.interceptor import DeliveryReport, ObservedBus, observed
from streamrl.observability.metrics.families import Meters
from streamrl.observability.metrics.metering import MeteringObserver
from streamrl.observability.tracing.context import LoggedTraces, SpanContext, TraceSpan, context_of
from streamrl.observability.tracing.role_tracers import tracing_of
from streamrl.schemas.errors import DeliveryUnknown, Superseded
from streamrl.schemas.topics import TRAJECTORIES, WORK_ORDERS
from tests.fakes.publisher import FailingBus
from tests.schemas.examples import trajectory, work_order

RECORD = Outgoing("t", b"v", "k")


@dataclass
class Watcher:
    """Writes down what it is shown, and fails where a test says so."""

    fails: str = ""
    seen: list[tuple[str, object]] = field(default_factory=list)

    def note(self, what: str, of: object) -> None:
        self.seen.append((what, of))
        if what == self.fails:
            raise ZeroDivisionError

    def sending(self, records: list[Outgoing]) -> "WatchedDelivery":
        self.note("sending", len(records))
        return WatchedDelivery(self)

    def received(self, records: Sequence[Record]) -> None:
        self.note("received", len(records))

    @property
    def steps(self) -> list[str]:
        return [what for what, _ in self.seen]

    @property
    def reports(self) -> list[DeliveryReport]:
        return [of for _, of in self.seen if isinstance(of, DeliveryReport)]


@dataclass
class WatchedDelivery:
    watcher: Watcher

    def accepted(self) -> None:
        self.watcher.note("accepted", None)

    def settled(self, report: DeliveryReport) -> None:
        self.watcher.note("settled", report)


def with_topic(bus: MemoryBus) -> MemoryBus:
    bus.create_topic("t", 1)
    return bus


async def all_of(bus: Bus) -> Sequence[Record]:
    subscription = await bus.subscribe(["t"], client_id="c")
    return await subscription.poll()


def test_nothing_is_wrapped_without_observers() -> None:
    bus = MemoryBus()
    assert observed(bus) is bus


async def test_metrics_and_traces_share_one_wrapper() -> None:
    bus, meters, spans = MemoryBus(), Meters("r"), list[TraceSpan]()
    for topic in (TRAJECTORIES, WORK_ORDERS):
        bus.create_topic(topic.full_name("r"), 1)
    tracing = tracing_of("worker", "worker-1", "r", 1.0, spans.append, LoggedTraces())
    assert tracing is not None
    both = observed(bus, tracing.observer, MeteringObserver(meters))
    assert isinstance(both, ObservedBus)
    assert both.inner is bus
    order, one = work_order("2 + 2"), trajectory(0)
    ordered = Outgoing.of("r.work-orders", order, key=one.group_id)
    asked = await bus.publisher("dispatcher")
    await asked.publish(ordered._replace(headers=(*ordered.headers, *SpanContext(7, 9).headers)))
    subscription, publisher = await both.subscribe(["r.work-orders"], client_id="w"), await both.publisher("w")
    assert len(await subscription.poll()) == 1
    await publisher.publish(Outgoing.of("r.trajectories", one, key=one.group_id))
    await asyncio.sleep(0)
    (stored,) = bus.log("r.trajectories").partitions[0]
    assert context_of(stored.headers) == spans[-1].context
    for name, short in (("bus_published_records_total", "trajectories"), ("bus_consumed_records_total", "work-orders")):
        assert meters.registry.get_sample_value(f"streamrl_{name}", {"run": "r", "topic": short}) == 1


async def test_a_record_is_shown_when_it_is_taken_and_when_the_broker_has_it() -> None:
    watcher = Watcher()
    publisher = await observed(with_topic(MemoryBus()), watcher).publisher("p")
    await publisher.publish(RECORD)
    await asyncio.sleep(0)
    assert watcher.steps == ["sending", "accepted", "settled"]
    (report,) = watcher.reports
    assert (report.position, report.error) == (("t", 0, 0), None)
    assert report.ended_s >= report.began_s > 1e9


async def test_an_unknown_outcome_is_shown_with_its_error() -> None:
    watcher = Watcher()
    bus = FailingBus(fail=lambda _: DeliveryUnknown("late"))
    publisher = await observed(with_topic(bus), watcher).publisher("p")
    with pytest.raises(DeliveryUnknown):
        await publisher.publish(RECORD)
    await asyncio.sleep(0)
    assert [type(report.error) for report in watcher.reports] == [DeliveryUnknown]


async def test_a_transaction_is_shown_once_and_as_accepted_only_if_it_is_committed() -> None:
    watcher = Watcher()
    bus = observed(with_topic(MemoryBus()), watcher)
    old = await bus.transactional("id")
    await old.commit([RECORD, RECORD])
    assert watcher.seen[:2] == [("sending", 2), ("accepted", None)]
    assert watcher.reports[0].position is None, "a transaction does not learn its offsets"
    await bus.transactional("id")
    with pytest.raises(Superseded):
        await old.commit([RECORD])
    assert watcher.steps[3:] == ["sending", "settled"]
    assert [type(report.error) for report in watcher.reports] == [type(None), Superseded]


@pytest.mark.parametrize("fails", ["sending", "accepted", "settled", "received"])
async def test_observing_never_fails(fails: str) -> None:
    """Who raises is dropped; the other observer and the records go on."""
    faulty, fine = Watcher(fails), Watcher()
    bus = observed(with_topic(MemoryBus()), faulty, fine)
    publisher = await bus.publisher("p")
    for count in (1, 2):
        await publisher.publish(RECORD)
        await asyncio.sleep(0)
        assert len(await all_of(bus)) == count
    assert faulty.steps.count(fails) == 1
    assert faulty.steps[-1] == fails
    assert fine.steps == ["sending", "accepted", "settled", "received"] * 2


async def test_other_calls_of_an_observed_client_go_to_the_inner_one() -> None:
    bus = with_topic(MemoryBus())
    around: Bus = observed(bus, Watcher())
    publisher = await around.publisher("p")
    await publisher.publish(RECORD)
    await publisher.flush()
    await publisher.close()
    subscription: Subscription = await around.subscribe(["t"], client_id="c", group_id="g")
    partition = TopicPartition("t", 0)
    assert subscription.partitions() == {partition}
    assert await subscription.end_offsets() == {partition: 1}
    assert await subscription.beginning_offsets() == {partition: 0}
    subscription.pause([partition])
    assert await subscription.poll(timeout_s=0.01) == []
    subscription.resume([partition])
    assert len(await subscription.poll()) == 1
    assert await subscription.positions() == {partition: 1}
    await subscription.commit({partition: 1})
    await subscription.close()
