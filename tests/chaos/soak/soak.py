"""One long run with kills: each role is spared for one stretch of it, so that its memory can be watched."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions
from streamrl.bus.embedded.jars import KAFKA_VERSION
from streamrl.bus.embedded.node import free_ports
from tests.chaos.campaign.results import PACKAGES
from tests.chaos.checking.checker import Findings
from tests.chaos.checking.verdict import judge
from tests.chaos.runs.brokers import Broker, Brokers
from tests.chaos.runs.fleet import Fleet
from tests.chaos.runs.setting import Setting, create_topics, make_setting
from tests.chaos.soak.samples import Sample, look_at, slopes
from tests.pipeline.local_run import metric_lines

SAMPLE_EVERY_S = 5.0
BROKER = "broker"
VICTIMS: tuple[tuple[str, ...], ...] = (
    ("worker-1", "coordinator", "relay"),
    ("worker-1", "trainer", BROKER),
    ("worker-1", "trainer", "dispatcher"),
)
"""Whom kills hit, by third of the soak; worker-0 lives throughout."""
STEPS = 1_000_000
CHANGES = {"training": {"max_steps": STEPS, "checkpoint_every": 20}}


@dataclass
class Soak:
    """A soak under way."""

    minutes: float
    kill_every_s: float
    setting: Setting
    broker: Broker
    fleet: Fleet
    say: Callable[[str], None]
    generator: random.Random
    began: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)
    kills: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def at(self) -> float:
        return time.monotonic() - self.began

    def step(self) -> int:
        lines = metric_lines(self.setting.directory.metrics, last=2)
        return int(lines[-1]["step"]) if lines else 0

    def left_s(self) -> float:
        return self.minutes * 60 - self.at()

    async def sample_loop(self) -> None:
        while True:
            for name in self.fleet.roles:
                self._look(name, self.fleet.pid(name))
            self._look(BROKER, self.broker.cluster.pids[0])
            self.fleet.check_others()
            await asyncio.sleep(SAMPLE_EVERY_S)

    def _look(self, role: str, pid: int | None) -> None:
        sample = look_at(role, pid, self.at()) if pid is not None else None
        if sample is not None:
            self.samples.append(sample)

    async def kill_loop(self) -> None:
        """Kill one after the other, and leave the last stretch in peace so that the run ends in good order."""
        victim = ""
        while self.left_s() > self.kill_every_s:
            await asyncio.sleep(self.kill_every_s)
            third = min(len(VICTIMS) - 1, int(self.at() / (self.minutes * 60) * len(VICTIMS)))
            victim = self.generator.choice([role for role in VICTIMS[third] if role != victim])
            self.kills[victim] = self.kills.get(victim, 0) + 1
            self.say(f"{self.at():6.0f} s  killing {victim}, step {self.step()}")
            if victim == BROKER:
                await self.broker.kill(0)
                await self.broker.start(0)
            else:
                self.fleet.kill(await self.fleet.living(victim))
        await asyncio.sleep(max(0.0, self.left_s()))


async def run_soak(
    root: Path, model: Path, minutes: float, kill_every_s: float, seed: int, say: Callable[[str], None]
) -> tuple[dict[str, Any], list[Sample]]:
    """The figures, and the samples behind them."""
    brokers = Brokers(root)
    try:
        broker = await brokers.only("one")
        setting = make_setting(root / "soak", model, "soak", broker.address, free_ports(1)[0], CHANGES)
        await create_topics(setting)
        fleet = Fleet(setting.specs)
        soak = Soak(minutes, kill_every_s, setting, broker, fleet, say, random.Random(seed))
        await _run(soak)
        verdict = await judge(setting, broker.address)
        soak.problems += verdict.problems
        return _figures(soak, verdict.findings, _size_of(broker), seed), soak.samples
    finally:
        await brokers.close()


async def _run(soak: Soak) -> None:
    soak.fleet.start()
    tasks = [asyncio.create_task(soak.kill_loop()), asyncio.create_task(soak.sample_loop())]
    ended = asyncio.create_task(soak.fleet.trainer_ended())
    try:
        await asyncio.wait([*tasks, ended], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            soak.problems.append(f"the trainer ended early: {ended.result()}")
        for task in tasks:
            if task.done() and (error := task.exception()) is not None:
                soak.problems.append(f"{type(error).__name__}: {error}")
    finally:
        for task in tasks:
            task.cancel()
        ended.cancel()
        await asyncio.gather(*tasks, ended, return_exceptions=True)
        soak.problems += [f"process {pid} is left behind" for pid in await soak.fleet.close()]


def _size_of(broker: Broker) -> float:
    """MiB of the broker's data."""
    folders = [spec.data for spec in broker.cluster.specs]
    return (
        sum(path.stat().st_blocks * 512 for folder in folders for path in folder.rglob("*") if path.is_file()) / 2**20
    )


def _figures(soak: Soak, findings: Findings, broker_mib: float, seed: int) -> dict[str, Any]:
    return {
        "minutes": soak.minutes,
        "kill_every_s": soak.kill_every_s,
        "kills": soak.kills,
        "steps": len(findings.steps),
        "trajectories": findings.counts(),
        "lost": findings.lost,
        "trained_twice": findings.trained_twice,
        "broker_disk_mib": round(broker_mib, 1),
        "slopes": [slope.as_json() for slope in slopes(soak.samples)],
        "problems": soak.problems[:20],
        "conditions": conditions(
            soak.began, seed, PACKAGES, f"make soak MINUTES={soak.minutes:g}", Kafka=KAFKA_VERSION
        ),
    }
