"""What a trajectory crosses between a worker and aiokafka, counted where aiokafka is handed the record."""

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from aiokafka.producer.message_accumulator import BatchBuilder

from streamrl.bus.kafka.publisher import KafkaPublisher
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.memory import MemoryBus, MemoryPublisher
from streamrl.bus.port import Bus, Outgoing, Position
from streamrl.observability.interceptor import observed
from streamrl.observability.metrics.families import Meters
from streamrl.observability.metrics.metering import metering_of
from streamrl.observability.tracing.context import LoggedTraces, SpanContext, TraceSpan
from streamrl.observability.tracing.role_tracers import tracing_of
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.producers.generation.worker import GenerationWorker, RunContext
from streamrl.schemas.control import control_key
from streamrl.schemas.identifiers import PolicyVersion, partition_of_worker
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import CATALOGUE, CONTROL, WORK_ORDERS
from streamrl.weights.fetch import WeightsFetcher
from tests.architecture.sources import PACKAGES, package_of
from tests.fakes.engine import FakeEngine, FakeTokenizer
from tests.fakes.scorer import FakeScorer
from tests.fakes.topics import create_topics
from tests.fakes.waiting import until
from tests.producers.generation.factories import WORKER, running_relay, work_order

RUN = "r"
Crossing = tuple[bytes | None, list[str]]
TOPICS = [topic.full_name(RUN) for topic in CATALOGUE]


class FakeProducer:
    """What the publisher needs of aiokafka's producer; every batch is stored at once."""

    offset = 0

    def __init__(self) -> None:
        # Tasks that do not end, and no transaction: all that the publisher watches.
        endless = asyncio.get_running_loop().create_future()
        self.client = SimpleNamespace(_sync_task=endless)
        self._sender = SimpleNamespace(sender_task=endless)
        self._txn_manager = SimpleNamespace(_transaction_waiter=endless)

    async def partitions_for(self, _topic: str) -> None:
        pass

    async def send_batch(self, _builder: BatchBuilder, _topic: str, **_where: int) -> "asyncio.Future[FakeProducer]":
        future: asyncio.Future[FakeProducer] = asyncio.get_running_loop().create_future()
        future.set_result(self)
        return future

    async def stop(self) -> None:
        pass


class BoundaryPublisher(MemoryPublisher):
    """Stores a record where the rest of the world reads, and then hands it over as every worker does: to aiokafka."""

    def __init__(self, bus: MemoryBus, client_id: str) -> None:
        super().__init__(bus, client_id)
        producer: Any = FakeProducer()

        async def connect() -> Any:
            return producer

        self.kafka = KafkaPublisher(producer, connect, KafkaSettings(bootstrap_servers="none:1"), client_id)

    async def submit(self, record: Outgoing) -> "asyncio.Future[Position]":
        await super().submit(record)
        return await self.kafka.submit(record)

    async def close(self) -> None:
        await self.kafka.close()


@dataclass
class BoundaryBus(MemoryBus):
    """A memory bus whose publishers hand their records to aiokafka as well."""

    async def publisher(self, client_id: str) -> BoundaryPublisher:
        return BoundaryPublisher(self, client_id)


@pytest.fixture
def crossed(monkeypatch: pytest.MonkeyPatch) -> list[Crossing]:
    """For each record that aiokafka is handed: its key, and our modules at work, from outside to inside."""
    found: list[Crossing] = []
    append = BatchBuilder.append

    def counted(self: BatchBuilder, **record: Any) -> Any:
        found.append((record["key"], modules_of(sys._getframe(1))))
        return append(self, **record)

    async def counts(*_: object) -> dict[str, int]:
        return dict.fromkeys(TOPICS, 8)

    monkeypatch.setattr(BatchBuilder, "append", counted)

    async def stop(producer: FakeProducer, _timeout_s: float) -> None:
        await producer.stop()

    monkeypatch.setattr("streamrl.bus.kafka.publisher.partitions_seen_by", counts)
    monkeypatch.setattr("streamrl.bus.kafka.publisher.stop", stop)
    return found


def modules_of(frame: FrameType | None) -> list[str]:
    names: list[str] = []
    while frame is not None:
        name = frame.f_globals["__name__"]
        if package_of(name) in PACKAGES and name not in names:
            names.insert(0, name)
        frame = frame.f_back
    return names


async def publish_one_trajectory(outer: Bus, inner: MemoryBus, cache: Path) -> None:
    """A worker on ``outer`` gets its weights and an order of one sample; ends when its trajectory is stored."""
    stop, world, order = asyncio.Event(), MemoryPublisher(inner, "world"), work_order(samples=1)
    async with running_relay() as relay:
        announced = relay.add(PolicyVersion(1, 0))
        await world.publish(Outgoing.of(CONTROL.full_name(RUN), announced, key=control_key(announced)))
        worker = GenerationWorker(
            bus=outer,
            context=RunContext(RUN, LoopSettings(), GenerationSettings()),
            worker_id=WORKER,
            engine=FakeEngine(),
            tokenizer=FakeTokenizer(),
            rewards=FakeScorer(),
            fetcher=WeightsFetcher(cache),
        )
        running = asyncio.create_task(worker.run(stop))
        await until(lambda: running.done() or bool(inner.log(f"{RUN}.heartbeats").partitions[0]))
        ordered = Outgoing.of(
            WORK_ORDERS.full_name(RUN), order, key=order.group_id, partition=partition_of_worker(WORKER)
        )
        await world.publish(ordered._replace(headers=(*ordered.headers, *SpanContext(7, 9).headers)))
        await until(lambda: running.done() or bool(inner.log(f"{RUN}.trajectories").partitions[order.partition]))
        await asyncio.sleep(0.05)
        stop.set()
        await running


async def test_a_trajectory_crosses_at_most_four_layers(crossed: list[Crossing], tmp_path: Path) -> None:
    bus, meters, spans = create_topics(BoundaryBus(), RUN), Meters(RUN), list[TraceSpan]()
    tracing = tracing_of("worker", WORKER, RUN, 1.0, spans.append, LoggedTraces())
    assert tracing is not None
    observer, _ = metering_of("worker", meters)
    await publish_one_trajectory(observed(bus, tracing.observer, observer), bus, tmp_path)
    assert "send trajectories" in {span.name for span in spans}
    published = {"run": RUN, "topic": "trajectories"}
    assert meters.registry.get_sample_value("streamrl_bus_published_records_total", published) == 1
    (modules,) = (modules for key, modules in crossed if key == work_order().group_id.encode())
    layers = modules[modules.index("streamrl.producers.generation.worker") + 1 :]
    assert len(layers) <= 4, layers
    assert layers.count("streamrl.observability.interceptor") == 1
