"""Every process has a clock of its own, wrong from the start, which is set by hours while the run goes on."""

import asyncio
import random
import shutil
import time
from dataclasses import replace

from streamrl.bus.history import BusHistory
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import message_of
from streamrl.schemas.reports import Heartbeat
from streamrl.schemas.topics import HEARTBEATS
from tests.chaos.faults import wrong_clock
from tests.chaos.faults.plan import Event, Fault
from tests.chaos.faults.wrong_clock import VARIABLE, WrongClock
from tests.chaos.runs.chaos_run import ChaosRun
from tests.chaos.runs.fleet import Fleet
from tests.chaos.runs.waiting import FleetFailed

HOUR_S = 3600.0
STEPS_S = (-24 * HOUR_S, -2 * HOUR_S, -90.0, -5.0, 5.0, 90.0, 2 * HOUR_S, 24 * HOUR_S)
SKEW_S = 600.0
STEPS = 8
ON_PATH = "import wrong_clock\n\nwrong_clock.install()\n"


def give_clocks(run: ChaosRun) -> None:
    """Start every process on a clock of its own."""
    folder = run.setting.directory.path / "clocks"
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(ON_PATH)
    # Beside it, since no process of a run has the directory on its path in which it was started.
    shutil.copy(wrong_clock.__file__, folder)
    chance = random.Random(run.plan.seed)
    specs = []
    for spec in run.setting.specs:
        path = folder / spec.name
        WrongClock(path).set(chance.uniform(-SKEW_S, SKEW_S))
        environment = {**spec.environment, "PYTHONPATH": str(folder), VARIABLE: str(path)}
        specs.append(replace(spec, environment=environment))
    run.fleet = Fleet(tuple(specs))


async def step_clocks(run: ChaosRun, event: Event) -> float:
    """One clock after the other is set; nobody may notice."""
    chance, before = random.Random(event.seed), dict(run.fleet.restarts)
    folder = run.setting.directory.path / "clocks"
    for number in range(STEPS):
        # A worker's is the first, since its heartbeats show whether clocks are set at all.
        role = chance.choice(run.fleet.roles) if number else "worker-0"
        WrongClock(folder / role).set(chance.choice(STEPS_S))
        await asyncio.sleep(event.lasts_s / STEPS)
        if not number:
            await _expect_wrong(run, WrongClock(folder / role).seconds)
    if run.fleet.restarts != before:
        raise FleetFailed(f"clocks that were set made processes die: {run.fleet.restarts}")
    return time.time()


async def _expect_wrong(run: ChaosRun, seconds: float) -> None:
    history = BusHistory(KafkaBus(KafkaSettings(bootstrap_servers=run.broker.address)), "clocks")
    topic = HEARTBEATS.full_name(run.setting.name)
    stamped = [(record.timestamp, message_of(record)) async for record in history.records(topic)]
    found = [
        beat.sent_at - stored_at
        for stored_at, beat in stamped
        if isinstance(beat, Heartbeat) and beat.worker_id == "worker-0"
    ]
    if not found or abs(found[-1] - seconds) > 30.0:
        raise FleetFailed(f"expected heartbeats {seconds} s off, got {found[-1:]}")


FAULTS = (
    Fault(
        "clock-steps",
        step_clocks,
        ("A14",),
        lasts=(12.0, 20.0),
        settings={"training": {"max_steps": 60}},
        prepare=give_clocks,
        mixes=False,
    ),
)
