"""One run on a real broker, with repack and copies, loses every process and is fed garbage; `make chaos` does more.

A long test; ``tests/chaos/stops``, ``tests/chaos/crashing`` and ``tests/faults`` have its parts.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from streamrl.bus.embedded.node import free_ports
from tests.chaos.faults.plan import Event, Plan
from tests.chaos.faults.schedule import BY_NAME
from tests.chaos.runs.brokers import Broker
from tests.chaos.runs.chaos_run import execute
from tests.chaos.runs.setting import REPACKED, WITHOUT_A_MODEL

pytestmark = pytest.mark.long


class OfTheSession(Broker):
    """The tests' broker: neither fault of this run is one of the broker, so that nobody has to mend it."""

    def __init__(self, servers: str) -> None:
        self.servers = servers

    @property
    def address(self) -> str:
        return self.servers

    async def mend(self) -> None:
        pass


async def test_a_run_survives_its_faults_and_every_record_has_one_fate(tmp_path: Path, bootstrap_servers: str) -> None:
    all_kill, poison = BY_NAME["all-kill"], BY_NAME["poison"]
    training = {**WITHOUT_A_MODEL["training"], "max_steps": 24}
    all_kill = replace(all_kill, settings={**WITHOUT_A_MODEL, "training": training, **poison.settings})
    events = (Event(all_kill, 5, 0.1, 0.0, "", seed=3), Event(poison, 12, 0.1, 0.0, "", seed=4))
    plan = Plan(3, events, REPACKED, copies=True)
    outcome = await execute(plan, OfTheSession(bootstrap_servers), tmp_path, tmp_path, free_ports(1)[0])
    assert outcome.all_problems == [], str(plan)
    assert outcome.findings.trained > 0
    assert outcome.restarts.total() == 7
