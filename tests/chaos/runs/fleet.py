"""The processes of one run under the real supervisor; the trainer has one of its own, so that it can be replaced."""

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from streamrl.deploy.local.supervisor import Child, ChildSpec, Supervisor
from tests.chaos.runs.waiting import FleetFailed, until
from tests.pipeline.local_run import is_alive

MAX_RESTARTS = 30
GRACE_S = 12.0
TRAINER = "trainer"


@dataclass(frozen=True)
class Exit:
    """How a process that was started once has ended."""

    code: int
    last_line: str


@dataclass
class Fleet:
    """``specs`` as `streamrl run` makes them. ``pids``: every process ever seen, to find what is left behind."""

    specs: Sequence[ChildSpec]
    pids: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._others = Supervisor([spec for spec in self.specs if spec.name != TRAINER], MAX_RESTARTS, GRACE_S)
        self._trainer = Supervisor([self.spec(TRAINER)], MAX_RESTARTS, GRACE_S)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stops = {"others": asyncio.Event(), TRAINER: asyncio.Event()}
        self._extra: list[Child] = []

    def spec(self, name: str) -> ChildSpec:
        return next(spec for spec in self.specs if spec.name == name)

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.specs)

    def start(self) -> None:
        self._tasks["others"] = asyncio.create_task(self._others.run(self._stops["others"]))
        self.start_trainer()

    def start_trainer(self, *overrides: str) -> None:
        """Start the supervised trainer, the first one or one in the place of another that ended."""
        spec = self.spec(TRAINER)
        self._trainer = Supervisor([replace(spec, command=[*spec.command, *overrides])], MAX_RESTARTS, GRACE_S)
        self._stops[TRAINER] = asyncio.Event()
        self._tasks[TRAINER] = asyncio.create_task(self._trainer.run(self._stops[TRAINER]))

    async def end_trainer(self) -> None:
        """End the supervised trainer for good: SIGKILL, without a restart."""
        self._stops[TRAINER].set()
        with_child = self._trainer.children.get(TRAINER)
        if with_child is not None:
            self._send(with_child.pid, signal.SIGKILL)
        await asyncio.gather(self._tasks[TRAINER], return_exceptions=True)

    async def end_others(self) -> None:
        """End everything but the trainer, cleanly and for good."""
        self._stops["others"].set()
        await asyncio.gather(self._tasks["others"], return_exceptions=True)

    async def run_once(self, name: str, timeout_s: float, *overrides: str) -> Exit:
        """Start a process beside the supervised ones and wait for its end."""
        child = await self.start_extra(name, *overrides)
        return await self.end_of(child, timeout_s)

    async def start_extra(self, name: str, *overrides: str) -> Child:
        spec = self.spec(name)
        log = spec.log_path.with_name(f"{name}-extra-{len(self._extra)}.log")
        return await self.start_beside(replace(spec, command=[*spec.command, *overrides], log_path=log))

    async def start_beside(self, spec: ChildSpec) -> Child:
        """Start a process that nobody starts again."""
        child = await Child.start(spec)
        self._extra.append(child)
        self.pids.add(child.pid)
        return child

    async def end_of(self, child: Child, timeout_s: float) -> Exit:
        try:
            code = await asyncio.wait_for(child.process.wait(), timeout_s)
        except TimeoutError as error:
            raise FleetFailed(f"{child.spec.name} did not end in {timeout_s} s; {child.spec.log_path}") from error
        return Exit(code, child.last_line())

    def pid(self, name: str) -> int | None:
        supervisor = self._trainer if name == TRAINER else self._others
        child = supervisor.children.get(name)
        if child is not None:
            self.pids.add(child.pid)
        return None if child is None else child.pid

    async def living(self, name: str, timeout_s: float = 40.0) -> int:
        """Pid of a supervised process, once it runs."""
        await until(lambda: self.pid(name) is not None, f"restart of {name}", timeout_s)
        pid = self.pid(name)
        assert pid is not None
        return pid

    def kill(self, pid: int) -> None:
        """One of the supervised processes, or of ``pids``."""
        self._send(pid, signal.SIGKILL)

    def pause(self, pid: int) -> None:
        self.stopped.add(pid)
        self._send(pid, signal.SIGSTOP)

    def go_on(self, pid: int) -> None:
        self.stopped.discard(pid)
        self._send(pid, signal.SIGCONT)

    def _send(self, pid: int, number: signal.Signals) -> None:
        if pid in self.pids and is_alive(pid):
            os.kill(pid, number)

    async def trainer_ended(self) -> str | None:
        """Wait for the end of the supervised trainer: none when it took its last step, else the reason."""
        try:
            await asyncio.shield(self._tasks[TRAINER])
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # whatever the supervisor gave up on is the answer
            return str(error) or repr(error)
        return None

    def check_others(self) -> None:
        """Raise what ended the other processes, if anything did."""
        task = self._tasks["others"]
        if task.done() and task.exception() is not None:
            raise FleetFailed(str(task.exception()))

    @property
    def restarts(self) -> dict[str, int]:
        return {**self._others.restarts, **self._trainer.restarts}

    async def close(self) -> list[int]:
        """End everything; the pids that are still there afterwards (there must be none)."""
        for name in self.roles:
            self.pid(name)
        for pid in set(self.stopped):
            self.go_on(pid)
        for stop in self._stops.values():
            stop.set()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for child in self._extra:
            await child.wait_or_kill(0.0)
        return [pid for pid in self.pids if is_alive(pid)]

    def log_of(self, name: str) -> Path:
        return self.spec(name).log_path
