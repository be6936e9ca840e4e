import asyncio
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from streamrl.bus.embedded.node import free_ports
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import Outgoing, TopicPartition
from streamrl.observability.background import background
from streamrl.observability.metrics.exporting import Collecting, LagSampler, Metering, open_metering
from streamrl.observability.metrics.families import Meters
from streamrl.observability.metrics.settings import MetricsSettings
from streamrl.schemas.topics import TRAJECTORIES
from tests.contract.topics import create_topic
from tests.progress import patience, within

Collector = Callable[[], None]


def opened(role: str, folder: Path, port: int) -> AbstractContextManager[Metering | None]:
    return open_metering(role, role, "r", MetricsSettings(port=port), KafkaSettings(), folder)


def test_without_a_port_nothing_is_measured(tmp_path: Path) -> None:
    with opened("worker", tmp_path, 0) as metering:
        assert metering is None
    assert list(tmp_path.iterdir()) == []


def test_with_a_port_the_figures_are_served_and_the_coordinator_asks_for_consumer_lag(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with opened("coordinator", tmp_path, port) as metering:
        assert metering is not None
        assert len(metering.tasks) == 2
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            assert b'streamrl_build_info{process="coordinator"' in answer.read()
        assert (tmp_path / ".prometheus" / "r-coordinator.json").exists()


async def test_measuring_never_ends_a_role_and_ends_with_the_block() -> None:
    ended = []

    async def faulty(_over: asyncio.Event) -> None:
        raise ZeroDivisionError

    async def patient(over: asyncio.Event) -> None:
        await over.wait()
        ended.append("patient")

    async with background([faulty, patient]):
        await asyncio.sleep(0.01)
        assert ended == []
    assert ended == ["patient"]


async def test_a_collector_that_fails_is_left_out_and_one_added_later_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streamrl.observability.metrics.exporting.COLLECT_EVERY_S", 0.01)
    stop, asked = asyncio.Event(), asyncio.Event()

    def faulty() -> None:
        raise ZeroDivisionError

    collectors: list[Collector] = [faulty]
    with capture_logs() as logs:
        collecting = asyncio.create_task(Collecting(Meters("r"), collectors).run(stop))
        collectors.append(asked.set)  # as the dispatcher's status is, once the dispatcher is built
        await within(asked.wait(), 5)
        stop.set()
        await collecting
    assert collectors == [asked.set]
    assert len(logs) == 1


async def test_consumer_lag_is_what_a_group_has_not_committed(bootstrap_servers: str) -> None:
    kafka, meters, stop = KafkaSettings(bootstrap_servers=bootstrap_servers), Meters("lag-sampled"), asyncio.Event()
    topic = TRAJECTORIES.full_name(meters.run)
    await create_topic(bootstrap_servers, topic, 1)
    publisher = await KafkaBus(kafka).publisher("p")
    for _ in range(3):
        await publisher.publish(Outgoing(topic, b"v", None, 0))
    await publisher.close()
    reader = await KafkaBus(kafka).subscribe([topic], client_id="c", group_id="trainer-of-lag")
    await reader.commit({TopicPartition(topic, 0): 1})
    sampling = asyncio.create_task(LagSampler(meters, kafka, 0.05).run(stop))
    labels = {"run": meters.run, "topic": "trajectories", "partition": "0", "group": "trainer-of-lag"}
    async with patience(20):
        while meters.registry.get_sample_value("streamrl_consumer_lag_records", labels) != 2:
            await asyncio.sleep(0.05)
    stop.set()
    await sampling
    await reader.close()
