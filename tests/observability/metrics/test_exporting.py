import asyncio
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from structlog.testing import capture_logs

from bus.embedded.node import free_ports
from bus.kafka.settings import KafkaSettings
from observability.background import background
from observability.metrics.exporting import Collecting, Metering, open_metering
from observability.metrics.families import Meters
from observability.metrics.settings import MetricsSettings

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


async def test_a_background_task_that_fails_ends_nothing_and_all_end_with_the_block() -> None:
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


async def test_a_collector_that_fails_is_left_out_and_one_added_later_is_asked(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("observability.metrics.exporting.COLLECT_EVERY_S", 0.01)
    stop, asked = asyncio.Event(), asyncio.Event()

    def faulty() -> None:
        raise ZeroDivisionError

    collectors: list[Collector] = [faulty]
    with capture_logs() as logs:
        collecting = asyncio.create_task(Collecting(Meters("r"), collectors).run(stop))
        collectors.append(asked.set)  # as the dispatcher's status is, once the dispatcher is built
        await asyncio.wait_for(asked.wait(), 5)
        stop.set()
        await collecting
    assert collectors == [asked.set]
    assert len(logs) == 1
