"""One run under test, from its topics to its verdict: started, hit by its plan's faults, checked, cleaned away."""

import asyncio
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl.bus.embedded.node import free_ports
from streamrl.deploy.local.supervisor import Child, ChildSpec
from streamrl.settings.placement import ProcessPlace
from tests.chaos.checking.audited import audit_by_command, audit_problems
from tests.chaos.checking.books import read_books
from tests.chaos.checking.checker import Findings, check
from tests.chaos.checking.checkpoints import newest_checkpoint
from tests.chaos.checking.recovery import FaultTime, Recovery, recoveries
from tests.chaos.checking.witness import Witness
from tests.chaos.faults.plan import Event, Plan
from tests.chaos.runs.brokers import Broker
from tests.chaos.runs.fleet import Fleet
from tests.chaos.runs.setting import Setting, create_topics, make_setting
from tests.chaos.runs.waiting import FleetFailed, tick, until
from tests.pipeline.local_run import metric_lines

PATIENCE_S = 150.0
INSTANCE = "second"
"""The instance that a fault may attach to its run."""
INSTANCE_S = 90.0
"""For its command to come to its good end once the run is over; it reads all that there is before."""
COMMAND_EVERY = 10
"""Runs after which the audit is also called as a command; that takes seconds."""


@dataclass
class Outcome:
    """What came of a run; ``problems`` is empty when it passed. ``of_instance``: ledger of one that was attached."""

    plan: Plan
    directory: Path
    seconds: float = 0.0
    findings: Findings = field(default_factory=Findings)
    of_instance: Findings | None = None
    audit_problems: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    restarts: Counter[str] = field(default_factory=Counter)

    @property
    def passed(self) -> bool:
        return not self.all_problems

    @property
    def ledgers(self) -> list[Findings]:
        """The run's own, and an instance's."""
        return [self.findings] + ([] if self.of_instance is None else [self.of_instance])

    @property
    def all_problems(self) -> list[str]:
        own = [] if self.of_instance is None else [f"{INSTANCE}: {line}" for line in self.of_instance.problems]
        return self.problems + self.findings.problems + own + [f"audit: {line}" for line in self.audit_problems]


@dataclass
class ChaosRun:
    """What faults act upon. ``expected_end``: text with which the supervised trainer must end, none for a good end.

    ``is_whole``: nobody deleted the topic that the books are about. ``attached``: the command of the instance.
    """

    plan: Plan
    broker: Broker
    setting: Setting
    fleet: Fleet
    patience_s: float = PATIENCE_S
    times: list[FaultTime] = field(default_factory=list)
    cleanups: list[Callable[[], Any]] = field(default_factory=list)
    expected_end: str | None = None
    reaches_last_step: bool = True
    is_whole: bool = True
    attached: Child | None = None

    def step(self) -> int:
        """Where the trainer is."""
        return int(_newest_line(self.setting)["step"])

    def instance_at(self) -> tuple[int, int]:
        """Lineage and step of the instance."""
        line = _newest_line(self.setting.of_instance(INSTANCE))
        return int(line["lineage/number"]), int(line["step"])

    async def attach(self) -> None:
        """`streamrl attach`, as a user gives it; its command starts the instance's trainer again when it dies."""
        directory = self.setting.directory
        command = [sys.executable, "-P", "-m", "streamrl", "attach", INSTANCE, "--run", str(directory.path)]
        command += ["--algorithm", "rloo", "--from", "beginning"]
        spec = ChildSpec("attach", command, directory.logs / "attach.log", ProcessPlace().environment)
        self.attached = await self.fleet.start_beside(spec)

    async def instance_ended(self) -> None:
        """The run is over, and the instance with it, in good order."""
        if self.attached is not None:
            ended = await self.fleet.end_of(self.attached, INSTANCE_S)
            if ended.code != 0:
                raise FleetFailed(f"the instance's command ended with {ended}")

    async def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
        await until(condition, what, timeout_s)

    async def until_step(self, step: int, timeout_s: float = 60.0) -> None:
        await self.until(lambda: self.step() >= step, f"step {step}", timeout_s)


def _newest_line(setting: Setting) -> Mapping[str, Any]:
    """The newest line of a trainer's metrics."""
    lines = metric_lines(setting.directory.metrics, last=2)
    return lines[-1] if lines else {"step": 0, "lineage/number": 0}


async def execute(
    plan: Plan, broker: Broker, root: Path, model: Path, relay_port: int, patience_s: float = PATIENCE_S
) -> Outcome:
    """The whole life of one run. Its directory stays if it failed. ``patience_s``: until it must be over."""
    began = time.monotonic()
    name = f"{plan.fault.name}-{plan.seed}"
    copies_port = free_ports(1)[0] if plan.has_copies else 0
    setting = make_setting(root / name, model, name, broker.address, relay_port, plan.settings, copies_port)
    run = ChaosRun(plan, broker, setting, Fleet(setting.specs), patience_s)
    witness = Witness(setting.settings.kafka, setting.name)
    outcome = Outcome(plan, root / name)
    try:
        for prepare in plan.preparations:
            prepare(run)
        await create_topics(setting)
        witness.start()
        await _drive(run)
    except Exception as error:  # whatever went wrong is this run's result
        outcome.problems.append(f"{type(error).__name__}: {error}")
    finally:
        left = await run.fleet.close()
        outcome.problems += [f"process {pid} is left behind" for pid in left]
        await broker.mend()
        await witness.stop()
        await _judge(run, witness, outcome)
        for cleanup in reversed(run.cleanups):
            cleanup()
    outcome.restarts = Counter(run.fleet.restarts)
    outcome.seconds = time.monotonic() - began
    if outcome.passed:
        shutil.rmtree(outcome.directory, ignore_errors=True)
    return outcome


async def _drive(run: ChaosRun) -> None:
    run.fleet.start()
    injecting = asyncio.create_task(_inject_all(run))
    watching = asyncio.create_task(_watch(run.fleet))
    try:
        async with asyncio.timeout(run.patience_s):
            await asyncio.wait({injecting, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            await injecting
            ended = asyncio.create_task(run.fleet.trainer_ended())
            await asyncio.wait({ended, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            reason = await ended
            await run.instance_ended()
    except TimeoutError as error:
        raise FleetFailed(f"not over after {run.patience_s} s, at step {run.step()}") from error
    finally:
        for task in (injecting, watching):
            task.cancel()
        await asyncio.gather(injecting, watching, return_exceptions=True)
    if (reason is None) != (run.expected_end is None) or (run.expected_end or "") not in (reason or ""):
        raise FleetFailed(f"expected the trainer to end with {run.expected_end!r}, got {reason!r}")


async def _inject_all(run: ChaosRun) -> None:
    await asyncio.gather(*(_inject(run, event) for event in run.plan.events))


async def _inject(run: ChaosRun, event: Event) -> None:
    await run.until_step(event.at_step, run.patience_s)
    await asyncio.sleep(event.after_s)
    began = time.time()
    ended = await event.fault.inject(run, event)
    run.times.append(FaultTime(event.fault.name, began, ended or time.time(), event.target))


async def _watch(fleet: Fleet) -> None:
    """Note every pid, and end when a process other than the trainer cannot be kept alive."""
    while True:
        for name in fleet.roles:
            fleet.pid(name)
        fleet.check_others()
        await tick()


async def _judge(run: ChaosRun, witness: Witness, outcome: Outcome) -> None:
    setting = run.setting
    try:
        books = await read_books(run.broker.address, setting.name)
        durable = newest_checkpoint(setting)
        last_step = setting.last_step if run.reaches_last_step else None
        groups = setting.settings.loop.groups_per_step
        if run.is_whole:
            outcome.findings = check(books, durable, groups, last_step)
            own = setting.of_instance(INSTANCE)
            if own.directory.metrics.exists():
                own_books = await read_books(run.broker.address, own.name)
                outcome.of_instance = check(own_books, newest_checkpoint(own), groups, None)
        outcome.problems += [f"witness: {line}" for line in await witness.problems(run.broker.address)]
        outcome.audit_problems = await _audited(run, outcome)
        outcome.recoveries = recoveries(books, run.times)
    except Exception as error:
        outcome.problems.append(f"checking failed: {type(error).__name__}: {error}")


async def _audited(run: ChaosRun, outcome: Outcome) -> list[str]:
    if not run.is_whole:
        return []
    instances = {} if outcome.of_instance is None else {INSTANCE: outcome.of_instance}
    problems = await audit_problems(run.setting, run.broker.address, outcome.findings, instances)
    if run.plan.seed % COMMAND_EVERY == 0:
        problems += await audit_by_command(run.setting)
    return problems
