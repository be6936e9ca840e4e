import asyncio
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from bus.embedded.node import free_ports
from bus.memory import MemoryBus
from bus.port import Bus
from observability.metrics.exporting import beside, exported
from observability.metrics.interceptor import MeasuredBus
from settings.loading import validated
from settings.tree import Settings


@dataclass
class Role:
    """A role with a bus."""

    bus: Bus


def settings(folder: Path, port: int) -> Settings:
    run = {"name": "r", "directory": str(folder)}
    return validated({"run": run, "model": {"path": "m"}, "data": {"path": "p.jsonl"}, "metrics": {"port": port}})


def test_without_a_port_the_role_stays_as_it_is(tmp_path: Path) -> None:
    role = Role(MemoryBus())
    with exported("worker", "worker-0", role, settings(tmp_path, 0)) as (loop, companions):
        assert loop is role
        assert isinstance(role.bus, MemoryBus)
        assert companions == []


def test_with_a_port_the_bus_counts_and_the_figures_are_served(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with exported("coordinator", "coordinator", Role(MemoryBus()), settings(tmp_path, port)) as (loop, companions):
        assert isinstance(loop.bus, MeasuredBus)
        assert len(companions) == 2
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            assert b'streamrl_build_info{process="coordinator"' in answer.read()
        assert (tmp_path / ".prometheus" / "r-coordinator.json").exists()


async def test_a_companion_that_fails_ends_nothing_and_all_are_told_when_it_is_over() -> None:
    ended = []

    async def faulty(_over: asyncio.Event) -> None:
        raise ZeroDivisionError

    async def patient(over: asyncio.Event) -> None:
        await over.wait()
        ended.append("patient")

    async with beside([faulty, patient]):
        await asyncio.sleep(0.01)
        assert ended == []
    assert ended == ["patient"]
