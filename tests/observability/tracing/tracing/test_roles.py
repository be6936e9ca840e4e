from dataclasses import dataclass
from pathlib import Path

from bus.memory import MemoryBus
from bus.port import Bus
from observability.tracing.context import LoggedTraces
from observability.tracing.engine import TracedEngine
from observability.tracing.interceptor import TracedBus
from observability.tracing.roles import traced
from producers.generation.engines.port import Engine
from settings.loading import validated
from settings.tree import Settings
from tests.fakes.engine import FakeEngine


@dataclass
class Role:
    bus: Bus
    engine: Engine


def settings(folder: Path, traces: str) -> Settings:
    run = {"name": "r", "directory": str(folder)}
    return validated({"run": run, "model": {"path": "m"}, "data": {"path": "p"}, "telemetry": {"traces": traces}})


def test_off_the_role_stays_as_it_is_and_nothing_is_written(tmp_path: Path) -> None:
    bus, engine = MemoryBus(), FakeEngine()
    role = Role(bus, engine)
    with traced("worker", "worker-0", role, settings(tmp_path, "off"), LoggedTraces()):
        assert role.bus is bus
        assert role.engine is engine
    assert not (tmp_path / "r").exists()


def test_on_a_worker_gets_another_bus_and_another_engine(tmp_path: Path) -> None:
    role = Role(MemoryBus(), FakeEngine())
    with traced("worker", "worker-0", role, settings(tmp_path, "file"), LoggedTraces()):
        assert isinstance(role.bus, TracedBus)
        assert isinstance(role.engine, TracedEngine)
        assert (role.engine.name, role.engine.max_num_seqs) == ("fake", 8)


def test_a_role_that_has_no_story_stays_as_it_is(tmp_path: Path) -> None:
    bus = MemoryBus()
    role = Role(bus, FakeEngine())
    with traced("ranker", "ranker", role, settings(tmp_path, "file"), LoggedTraces()):
        assert role.bus is bus
