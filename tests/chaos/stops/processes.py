"""A run of real processes on a real broker, under load: SIGTERM for one after the other, at random moments.

Each has to end in order, and is started again; the run goes on, and at its end the books have to balance.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sqlite3
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from streamrl.bus.embedded.node import free_ports
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.deploy.local.specs import ChildSpecs
from streamrl.deploy.local.supervisor import Child, ChildSpec
from streamrl.producers.gateway.keys import KeyFile
from streamrl.producers.gateway.settings import GatewaySettings
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory
from streamrl.settings.features import features
from tests.chaos.checking.audited import audit_by_command
from tests.chaos.checking.verdict import judge
from tests.chaos.runs.setting import COPIES, WITHOUT_A_MODEL, Setting, create_topics, make_setting
from tests.chaos.runs.waiting import FleetFailed, processes_with, tick, until
from tests.chaos.stops.moment import Moment
from tests.pipeline.accounts import read_all
from tests.pipeline.local_run import metric_lines

STOPPED = 128 + signal.SIGTERM
"""The documented end of a process that SIGTERM ended."""
OWN_END = 0
"""Of one that had come to its own end when the signal came."""
BEFORE_ITS_FIRST_LINE = -signal.SIGTERM
FIRST_LINE_S = 3.0
"""So long after its start may a process not know of signals yet, on a machine that has much to do."""
END_S, PATIENCE_S = 40.0, 120.0
UPTIME_S = (0.0, 2.5)
"""Between the stop of one process and that of the next."""
ROLES = {
    "gateway": 3,
    "relay": 2,
    COPIES: 2,
    "worker-0": 2,
    "worker-1": 2,
    "trainer": 2,
    "dispatcher": 2,
    "coordinator": 2,
    "evaluator": 2,
    "page": 2,
    "export": 2,
}
"""How often each is chosen, beside the others."""
MARK = "STOPS_MARK"
REWARDS = [1.0, 0.0]
"""Of the two choices of every completion."""
WRONG = re.compile(
    r"Traceback \(most recent|exception was never retrieved|was never awaited|Fatal Python error|ResourceWarning"
)
LEFT = ("*.tmp", "*.part", "*-wal", "*-shm", "*-journal", ".draft*")
KEPT, DELIVERED = "SELECT id, rewards, state FROM completions", 2
SECTIONS = {
    **WITHOUT_A_MODEL,
    "training": {**WITHOUT_A_MODEL["training"], "max_steps": 100_000, "checkpoint_every": 3},
    "evaluation": {"every": 20, "prompts": 4, "samples": 2},
    "evaluation.data.held_out": {"dataset": "chain_sum", "seed": 777},
}


@dataclass
class Life:
    """One process: ``asked`` is set by who is about to stop it."""

    spec: ChildSpec
    child: Child
    log_from: int
    is_asked: bool = False

    @property
    def said(self) -> str:
        with self.spec.log_path.open(errors="replace") as log:
            log.seek(self.log_from)
            return log.read()


@dataclass
class StoppedRun:
    """The processes of a run, what each stop came to, and what was wrong beside."""

    setting: Setting
    specs: dict[str, ChildSpec]
    random: Random
    lives: dict[str, Life] = field(default_factory=dict)
    moments: dict[str, list[Moment]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    exports: int = 0

    async def start(self, role: str) -> None:
        spec = self.specs[role]
        if role == "export":  # each into a directory of its own
            self.exports += 1
            spec = replace(
                spec, command=[*spec.command, "--out", f"{self.setting.directory.path}-export-{self.exports}"]
            )
        log = spec.log_path
        self.lives[role] = Life(spec, await Child.start(spec), log.stat().st_size if log.exists() else 0)

    async def stop(self, role: str, number: int) -> None:
        """SIGTERM; whatever was wrong with the end is noted."""
        life = self.lives.pop(role)
        age_s = time.monotonic() - life.child.started_at
        moment = Moment(number, "SIGTERM", age_s)
        self.moments.setdefault(role, []).append(moment)
        had_ended = life.child.process.returncode
        if had_ended is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(life.child.pid, signal.SIGTERM)
        try:
            code = await asyncio.wait_for(life.child.process.wait(), END_S)
        except TimeoutError:
            moment.problems.append(f"not ended {END_S} s after SIGTERM")
            os.kill(life.child.pid, signal.SIGKILL)
            code = await life.child.process.wait()
        fine = {STOPPED} | ({BEFORE_ITS_FIRST_LINE} if age_s < FIRST_LINE_S else set())
        if role == "export":
            fine |= {OWN_END}
        if code not in fine:
            when = "before it was asked" if had_ended is not None else "when it was asked"
            moment.problems.append(f"ended with {code} {when}: {_last_lines(life.said)}")
        if (found := WRONG.search(life.said)) is not None:
            moment.problems.append(f"its log: {life.said[max(0, found.start() - 300) : found.end() + 1200]}")

    async def stop_all(self) -> None:
        """The end of the run, those that give work first."""
        for role in ("dispatcher", "export", "page", "evaluator", "gateway", "worker-0", "worker-1", *self.specs):
            if role in self.lives:
                await self.stop(role, -1)

    def step(self) -> int:
        """Where the trainer is."""
        lines = metric_lines(self.setting.directory.metrics, last=3)
        return int(max((line.get("step", 0) for line in lines), default=0))


def _last_lines(said: str) -> str:
    return " | ".join(said.strip().splitlines()[-3:])[-600:]


def _specs(setting: Setting, copies_port: int, page_port: int, mark: str) -> dict[str, ChildSpec]:
    children, directory = ChildSpecs(setting.directory, []), setting.directory
    own = f"--relay.store={directory.path / COPIES}", f"--relay.port={copies_port}"
    command = [sys.executable, "-P", "-m", "streamrl"]
    page = [*command, "ui", "--run", str(directory.path), "--port", str(page_port), "--no-open"]
    export = [*command, "export", "--run", str(directory.path)]
    added = [process for feature in features() for process in feature.processes.started(setting.settings)]
    specs = [
        *children.all(2, others=added),
        children.of(COPIES, "relay", *own),
        ChildSpec("page", page, directory.logs / "page.log"),
        ChildSpec("export", export, directory.logs / "export.log"),
    ]
    return {spec.name: replace(spec, standby=(), environment=spec.environment | {MARK: mark}) for spec in specs}


async def stop_processes(
    count: int, address: str, root: Path, model: Path, seed: int, say: Callable[[str], None]
) -> StoppedRun:
    """So many stops in one run; what came of it, checked to the last record."""
    ports, mark = free_ports(4), uuid.uuid4().hex
    changes = {**SECTIONS, "gateway": {"enabled": True, "port": ports[2]}}
    setting = make_setting(root, model, f"stops-{seed}", address, ports[0], changes)
    run = StoppedRun(setting, _specs(setting, ports[1], ports[3], mark), Random(seed))
    await create_topics(setting)
    key = KeyFile(setting.settings.section(GatewaySettings).key_file(setting.directory.path / "gateway")).make_key(
        "tester", train=True
    )
    for role in run.specs:
        if role != "export":
            await run.start(role)
    try:
        async with _asking(ports[2], key, setting.name) as accepted:
            restarting = partial(_start_dead_again, run)
            await until(lambda: run.step() >= 3, "first steps", PATIENCE_S, restarting)
            await _stop_at_random(run, count, say)
            at = run.step()
            await until(lambda: run.step() > at, f"step after {at}, the one of the last stop,", PATIENCE_S, restarting)
    except FleetFailed as error:
        run.problems.append(str(error))
    finally:
        await run.stop_all()
    run.problems += [f"process left: {command:.200}" for command in processes_with(mark).values()]
    run.problems += _ports_left(ports) + _files_left(setting.directory.path)
    for role, moments in run.moments.items():
        say(f"[stops] process {role:14} {len(moments):7} {sum(bool(moment.problems) for moment in moments):8}")
    run.problems += await _feedback_lost(setting, address, accepted)
    await _audit(run, address)
    for problem in run.problems[:10]:
        say(f"    FAIL the run of processes: {problem}")
    return run


async def _stop_at_random(run: StoppedRun, count: int, say: Callable[[str], None]) -> None:
    for number in range(count):
        await asyncio.sleep(run.random.uniform(*UPTIME_S))
        (role,) = run.random.choices([*ROLES], [*ROLES.values()])
        if role not in run.lives:
            await run.start(role)  # an export, which comes to its own end
            await asyncio.sleep(run.random.uniform(0.0, 4.0))
        await run.stop(role, number)
        moment = run.moments[role][-1]
        if moment.problems:
            say(f"    FAIL {role} at the age of {moment.at_s:.1f} s: {moment.problems[0]}")
        if role != "export":
            await run.start(role)
        if (number + 1) % 25 == 0:
            say(f"[stop {number + 1:4}/{count}] step {run.step()}")


async def _start_dead_again(run: StoppedRun) -> None:
    """Note which processes died by themselves, and go on."""
    for role in [name for name, life in run.lives.items() if life.child.process.returncode is not None]:
        if role != "export":
            await run.stop(role, -1)
            await run.start(role)
    await tick()


@asynccontextmanager
async def _asking(port: int, key: str, model: str) -> AsyncIterator[list[str]]:
    """Requesters, who reward what they are answered; the ids of accepted feedback."""
    accepted = list[str]()

    async def ask(session: aiohttp.ClientSession) -> None:
        while True:
            try:
                body = {"model": model, "prompt": "say 1", "max_tokens": 8, "n": 2}
                async with session.post("/v1/completions", json=body) as response:
                    answer: Any = await response.json() if response.status == 200 else None
                if answer is not None:
                    given = {"id": answer["id"], "rewards": REWARDS}
                    async with session.post("/v1/feedback", json=given) as response:
                        if response.status == 200:
                            accepted.append(answer["id"])
                await asyncio.sleep(0.05)
            except (aiohttp.ClientError, TimeoutError, OSError):
                await asyncio.sleep(0.2)

    headers, timeout = {"Authorization": f"Bearer {key}"}, aiohttp.ClientTimeout(total=20)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=headers, timeout=timeout) as session:
        asking = [asyncio.create_task(ask(session)) for _ in range(3)]
        try:
            yield accepted
        finally:
            for task in asking:
                task.cancel()
            await asyncio.wait(asking)


def _ports_left(ports: Iterable[int]) -> list[str]:
    problems = []
    for port in ports:
        try:
            with socket.create_server(("127.0.0.1", port)):
                pass
        except OSError as error:
            problems.append(f"port {port} is not free: {error}")
    return problems


def _files_left(directory: Path) -> list[str]:
    return [f"file left: {path.relative_to(directory)}" for how in LEFT for path in directory.rglob(how)]


async def _feedback_lost(setting: Setting, address: str, accepted: list[str]) -> list[str]:
    """Accepted feedback is on the topic, or on the disk for the next gateway."""
    if not accepted:
        return ["no reward was ever accepted"]
    with contextlib.closing(sqlite3.connect(setting.directory.path / "gateway" / "feedback.sqlite")) as db:
        rows = {call_id: (json.loads(text), state) for call_id, text, state in db.execute(KEPT)}
    bus = KafkaBus(KafkaSettings(bootstrap_servers=address))
    records = await read_all(bus, setting.name, TRAJECTORIES)
    told = {one.trajectory_id for record in records if isinstance(one := record.message(), Trajectory)}
    problems = []
    for call_id in accepted:
        rewards, state = rows.get(call_id, ({}, None))
        if rewards != {str(choice): reward for choice, reward in enumerate(REWARDS)}:
            problems.append(f"accepted for {call_id}, on the disk: {rewards}")
        elif state == DELIVERED and not any(name.startswith(f"gateway/{call_id}/") for name in told):
            problems.append(f"noted as delivered, and is not: {call_id}")
    return problems[:5]


async def _audit(run: StoppedRun, address: str) -> None:
    run.problems += (await judge(run.setting, address)).problems
    run.problems += await audit_by_command(run.setting)


def results_of(run: StoppedRun) -> Mapping[str, Any]:
    """For the results file: by process, and for the run as a whole."""
    directory = str(run.setting.directory.path)
    found: dict[str, Any] = {
        f"process: {role}": _row(len(moments), [line for one in moments for line in one.problems[:1]], directory)
        for role, moments in sorted(run.moments.items())
    }
    return found | {"the run of processes": _row(sum(map(len, run.moments.values())), run.problems, directory)}


def _row(moments: int, problems: list[str], directory: str) -> dict[str, Any]:
    told = [line.replace(directory, "RUN")[:500] for line in problems[:10]]
    return {"moments": moments, "bad_ends": len(problems), "problems": told}
